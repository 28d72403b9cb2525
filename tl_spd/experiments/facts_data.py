"""The facts that the facts experiment ships: a pair to decompose, its reversed questions, and short facts of many relations.

1. The pair is the paper's: two athletes and their sports. Each comes with the subject that a causal trace corrupts.
2. The reversed questions go from the sport to the athlete: what a suppressed athlete -> sport direction should leave alone.
   Each gives the first name too: SmolLM2-135M does not name these two athletes from the sport alone.
3. Every other fact is a line of a relation: a template with ``{}`` for the subject, and ``subject = answer`` entries.

Answers begin with a space and should be one token. Whether they are, and whether the host knows them, is checked when the
experiment runs; a small host does not know all of them. Source: the pair and the style are the paper's; the facts are general
knowledge, written for this library.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fact:
    """A prompt and the one-token answer that should follow it.

    Attributes:
        prompt: the text up to the answer.
        answer: begins with a space.
        subject: the part of the prompt that the fact is about; "" where there is none to name.
        relation: what links subject and answer.
    """

    prompt: str
    answer: str
    subject: str = ""
    relation: str = ""


PAIR = (
    Fact("Tiger Woods plays professional", " golf", "Tiger Woods", "sport"),
    Fact("Kobe Bryant plays professional", " basketball", "Kobe Bryant", "sport"),
)
"""The facts to decompose. SmolLM2-135M does not know both in the wording of the paper or behind an example of another athlete."""

PAPER_PAIR = (
    Fact("Tiger Woods plays the sport of", " golf", "Tiger Woods", "sport"),
    Fact("Kobe Bryant plays the sport of", " basketball", "Kobe Bryant", "sport"),
)
"""The same in the paper's wording, for GPT-2 small."""

REVERSED = (
    Fact("The most famous athlete in golf is Tiger", " Woods", "golf", "athlete"),
    Fact("The most famous athlete in basketball is Kobe", " Bryant", "basketball", "athlete"),
)
"""One question from the sport to the athlete for each fact of the pair, in its order."""

_RELATIONS: dict[str, tuple[str, str]] = {
    "sport": (
        "{} plays professional",
        "Michael Jordan = basketball; LeBron James = basketball; Shaquille O'Neal = basketball; Magic Johnson = basketball; "
        "Roger Federer = tennis; Rafael Nadal = tennis; Serena Williams = tennis; Novak Djokovic = tennis; "
        "Tom Brady = football; Peyton Manning = football; Lionel Messi = football; Cristiano Ronaldo = football; "
        "Babe Ruth = baseball; Derek Jeter = baseball; Wayne Gretzky = hockey; Phil Mickelson = golf",
    ),
    "capital": (
        "The capital of {} is",
        "France = Paris; Germany = Berlin; Italy = Rome; Spain = Madrid; England = London; Japan = Tokyo; China = Beijing; "
        "Russia = Moscow; Egypt = Cairo; Greece = Athens; Portugal = Lisbon; Austria = Vienna; Ireland = Dublin; "
        "Poland = Warsaw; Canada = Ottawa; Cuba = Havana; Kenya = Nairobi; Norway = Oslo; Sweden = Stockholm; "
        "Turkey = Ankara; Iran = Tehran; Iraq = Baghdad; Afghanistan = Kabul; Thailand = Bangkok; Peru = Lima; "
        "Hungary = Budapest; Finland = Helsinki; Denmark = Copenhagen; Scotland = Edinburgh; Argentina = Buenos",
    ),
    "language": (
        "The people of {} speak",
        "France = French; Germany = German; Italy = Italian; Spain = Spanish; Japan = Japanese; Russia = Russian; "
        "Portugal = Portuguese; Mexico = Spanish; Brazil = Portuguese; England = English; China = Chinese; Korea = Korean; "
        "Egypt = Arabic; Greece = Greek; Turkey = Turkish; Poland = Polish",
    ),
    "currency": (
        "The currency used in {} is the",
        "the United States = US; Germany = euro; Mexico = pes; India = ru; Russia = rub; Thailand = Thai; Israel = "
        "Israeli; Poland = Polish; England = British; Sweden = Swedish",
    ),
    "author": (
        "{} was written by",
        "Romeo and Juliet = William; Hamlet = William; Pride and Prejudice = Jane; Oliver Twist = Charles; The novel War "
        "and Peace = Leo; The novel Frankenstein = Mary; The novel Nineteen Eighty-Four = George; The Old Man and the Sea "
        "= Ernest; The Origin of Species = Charles; The Communist Manifesto = Karl; The Adventures of Tom Sawyer = Mark",
    ),
    "symbol": (
        "The chemical symbol for {} is",
        "hydrogen = H; oxygen = O; carbon = C; nitrogen = N; iron = Fe; sodium = Na; helium = He; gold = Au; silver = Ag; "
        "potassium = K; copper = Cu; calcium = Ca; lead = Pb; zinc = Zn; uranium = U",
    ),
    "invention": (
        "{} was invented by",
        "The telephone = Alexander; The light bulb = Thomas; The World Wide Web = Tim; The steam engine = James; The "
        "printing press = Johannes; The cotton gin = Eli; Dynamite = Alfred",
    ),
    "young": (
        "A baby {} is called a",
        "dog = puppy; cat = kitten; cow = calf; bear = cub; lion = cub; sheep = lamb; goat = kid",
    ),
    "opposite": (
        "The opposite of {} is",
        "hot = cold; good = bad; light = dark; up = down; left = right; black = white; north = south; rich = poor; "
        "true = false; war = peace; love = hate; life = death; day = night; strong = weak; fast = slow; big = small; "
        "positive = negative; happy = sad; early = late; wet = dry; hard = soft; high = low",
    ),
    "continent": (
        "The country of {} lies in the continent of",
        "Kenya = Africa; Nigeria = Africa; Egypt = Africa; Ghana = Africa; China = Asia; India = Asia; Japan = Asia; "
        "France = Europe; Germany = Europe; Spain = Europe; Brazil = South; Peru = South; Canada = North; Mexico = North",
    ),
    "landmark": (
        "{} is located in the city of",
        "The Eiffel Tower = Paris; The Colosseum = Rome; The Kremlin = Moscow; The Statue of Liberty = New; Big Ben = London; "
        "The Brandenburg Gate = Berlin; The Golden Gate Bridge = San; The Louvre = Paris; The Parthenon = Athens; "
        "Buckingham Palace = London; The White House = Washington; The Hollywood Sign = Los; Wall Street = New",
    ),
    "founder": (
        "The founder of {} is",
        "Microsoft = Bill; Apple = Steve; Facebook = Mark; Amazon = Jeff; Ford = Henry; Wikipedia = Jimmy",
    ),
    "discovery": (
        "{} was discovered by",
        "Penicillin = Alexander; Radium = Marie; Gravity = Isaac; The electron = J; The theory of relativity = Albert",
    ),
    "painter": (
        "{} was painted by",
        "The Mona Lisa = Leonardo; The Starry Night = Vincent; The Last Supper = Leonardo; Guernica = Pablo",
    ),
    "surname": (
        "The {}",
        "physicist Albert = Einstein; physicist Isaac = Newton; naturalist Charles = Darwin; inventor Thomas = Edison; "
        "inventor Nikola = Tesla; inventor Alexander Graham = Bell; astronomer Johannes = Kepler; composer Johann "
        "Sebastian = Bach; composer Ludwig van = Beethoven; painter Leonardo da = Vinci; painter Pablo = Picasso; "
        "playwright William = Shakespeare; novelist Charles = Dickens; novelist Ernest = Hemingway; novelist Jane = "
        "Austen; poet Edgar Allan = Poe; philosopher Karl = Marx; philosopher Immanuel = Kant; philosopher Friedrich = "
        "Nietzsche; psychologist Sigmund = Freud; president Abraham = Lincoln; president Barack = Obama; president Ronald "
        "= Reagan; president Bill = Clinton; civil rights leader Martin Luther = King; leader Nelson = Mandela; leader "
        "Mahatma = Gandhi; leader Margaret = Thatcher; leader Winston = Churchill; explorer Christopher = Columbus; "
        "explorer Marco = Polo; singer Michael = Jackson; detective Sherlock = Holmes; boxer Muhammad = Ali; billionaire "
        "Bill = Gates; billionaire Elon = Musk; emperor Genghis = Khan; emperor Napoleon = Bonaparte",
    ),
    "sequence": (
        "In order: {}",
        "Monday, Tuesday, Wednesday, = Thursday; January, February, March, = April; one, two, three, = four; spring, "
        "summer, autumn, = winter; first, second, third, = fourth; A, B, C, = D; north, south, east, = west; five, six, "
        "seven, = eight; breakfast, lunch, = dinner",
    ),
    "definition": (
        "{}",
        "The planet closest to the Sun is = Mercury; The largest planet in the solar system is = Jupiter; The planet with "
        "the famous rings is = Saturn; The star at the center of our solar system is the = Sun; The natural satellite of "
        "the Earth is the = Moon; The largest ocean in the world is the = Pacific; The longest river in Africa is the = "
        "Nile; The highest mountain in the world is Mount = Everest; The largest country in the world by area is = "
        "Russia; The largest mammal in the world is the = blue; Water is made of hydrogen and = oxygen; Water freezes at "
        "zero degrees = Celsius; The frozen form of water is = ice; The organ that pumps blood is the = heart; The organ "
        "that we think with is the = brain; The gas that plants absorb is carbon = dioxide; The center of an atom is "
        "called the = nucleus; The force that pulls things down is = gravity; A triangle has three = sides; The sum of "
        "two and two is = four; The first president of the United States was George = Washington; The United States "
        "declared independence from = Great; The wizard Harry = Potter; The holy book of Islam is the = Quran; The holy "
        "book of Christianity is the = Bible; The Pope is the head of the Catholic = Church; The Great Wall of = China; "
        "The Statue of = Liberty; The Second World = War; The Declaration of = Independence; The theory of evolution by "
        "natural = selection; The speed of = light; The Milky = Way; The Industrial = Revolution; The Roman = Empire; "
        "Python is a programming = language; The United = States; New York = City; Twinkle, twinkle, little = star; To be "
        "or not to = be; Once upon a = time; Tarzan of the = A; Bees make = honey; Chickens lay = eggs",
    ),
    "game": (
        "The sport that {} plays is",
        "Michael Jordan = basketball; LeBron James = basketball; Roger Federer = tennis; Serena Williams = tennis; Phil "
        "Mickelson = golf",
    ),
    "state": (
        "The capital of the state of {} is",
        "Texas = Austin; Georgia = Atlanta; Massachusetts = Boston; Colorado = Denver; Ohio = Columbus; Arizona = Phoenix",
    ),
    "tongue": (
        "The official language of {} is",
        "Israel = Hebrew; Thailand = Thai; Vietnam = Vietnamese; Argentina = Spanish; Austria = German; Australia = "
        "English; Poland = Polish; Egypt = Arabic; Turkey = Turkish; Sweden = Swedish; Hungary = Hungarian",
    ),
}


def _facts() -> tuple[Fact, ...]:
    found = []
    for relation, (template, entries) in _RELATIONS.items():
        for entry in entries.split("; "):
            subject, answer = entry.rsplit(" = ", 1)
            found.append(Fact(template.format(subject), f" {answer}", subject, relation))
    return tuple(found)


@dataclass(frozen=True)
class FactSet:
    """What a facts run is about.

    Attributes:
        pair: the two facts to decompose, each with a subject that a causal trace corrupts.
        reversed: a question for each of them, in their order, from the answer to the subject.
        facts: other facts, which suppression should leave alone.
    """

    pair: tuple[Fact, ...]
    reversed: tuple[Fact, ...]
    facts: tuple[Fact, ...]

    def __post_init__(self) -> None:
        if len(self.pair) != 2 or len(self.reversed) != 2 or not self.facts:
            raise ValueError(
                f"A FactSet has two facts, two reversed questions and other facts; found {len(self.pair)}, "
                f"{len(self.reversed)} and {len(self.facts)}."
            )
        everything = (*self.pair, *self.reversed, *self.facts)
        texts = [text for fact in everything for text in (fact.prompt, fact.answer, fact.subject, fact.relation)]
        if bad := [text for text in texts if "\0" in text or text.encode("utf-8", "ignore").decode() != text]:
            raise ValueError(
                f"A fact's texts go into tables and may hold no NUL character and no half of a surrogate pair; found {bad[0]!r}."
            )
        prompts = [fact.prompt for fact in everything]
        if twice := [prompt for prompt in dict.fromkeys(prompts) if prompts.count(prompt) > 1]:
            raise ValueError(f"Every prompt may be there once; found {twice[0]!r} more often.")
        if without := [fact for fact in self.pair if not fact.subject or fact.subject not in fact.prompt]:
            raise ValueError(f"The subject {without[0].subject!r} is not in the prompt {without[0].prompt!r}.")

    @classmethod
    def read(cls, path: str | Path) -> FactSet:
        """The facts in a JSON file: ``pair``, ``reversed`` and ``facts``, each a list of objects with the fields of Fact.

        Raises:
            ValueError: another content; OSError: no such file.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(**{part: tuple(Fact(**fact) for fact in those) for part, those in found.items()})
        except (TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path} holds no facts ({error}). Wanted {{pair, reversed, facts}}, each a list of {{prompt, answer, "
                "subject, relation}; the last two may be left out, but for the pair's subject."
            ) from error


SHIPPED = FactSet(PAIR, REVERSED, _facts())
"""The facts that come with the library."""

IN_PAPERS_WORDS = FactSet(PAPER_PAIR, REVERSED, SHIPPED.facts)
"""The same with the paper's wording of the pair."""
