"""Causal tracing against three plain loops over whole passes of the host, and by what must hold at the ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformer_lens import HookedTransformer
from transformers import PreTrainedTokenizerFast

from tests.tiny import MORE_STYLES, STYLES, tiny_host, tiny_tokenizer, tiny_tokens, unchanged
from tl_spd.analysis import passes
from tl_spd.analysis.tracing import COLUMNS, causal_trace, find_subject, noise_draws

POINTS = {"resid": "blocks.{}.hook_resid_post", "mlp": "blocks.{}.hook_mlp_out", "attn": "blocks.{}.hook_attn_out"}


def plain(
    model: HookedTransformer, tokens: Tensor, subject: Sequence[int], answer: int, noise: Tensor, kind: str, window: int
) -> list[list[list[float]]]:
    """P(answer | restored) - P(answer | corrupted) for every layer, position and draw, each from whole passes."""
    _, clean = model.run_with_cache(tokens)
    layers = model.cfg.n_layers

    def p(draw: Tensor, restored: Sequence[str] = (), at: int = 0) -> float:
        def corrupt(value: Tensor, hook: object) -> Tensor:
            for place, added in zip(subject, draw, strict=True):
                value[0, place] = value[0, place] + added
            return value

        def restore(value: Tensor, hook: object) -> Tensor:
            value[0, at] = clean[hook.name][0, at]
            return value

        hooks = [("hook_embed", corrupt), *((name, restore) for name in restored)]
        with torch.no_grad():
            return model.run_with_hooks(tokens, fwd_hooks=hooks)[0, -1].softmax(-1)[answer].item()

    effects = []
    for layer in range(layers):
        span = (
            [layer]
            if kind == "resid"
            else [x for x in range(layers) if -(window // 2) <= x - layer < (window + 1) // 2]
        )
        names = [POINTS[kind].format(x) for x in span]
        rows = []
        for position in range(tokens.shape[1]):
            rows.append([p(draw, names, position) - p(draw) for draw in noise])
        effects.append(rows)
    return effects


@pytest.mark.parametrize("style", [*STYLES, *MORE_STYLES])
def test_every_row_equals_three_plain_loops(style: str) -> None:
    model, tokens, subject = tiny_host(style, n_layers=3), tiny_tokens(1, 4, 1), [2, 1]
    answer = int(model(tokens)[0, -1].argmax())
    noise = noise_draws(model, 2, 3, 0.5, seed=4)
    window = 2 if style == "llama" else 3
    with unchanged(model):
        table = causal_trace(model, tokens, subject, answer, window=window, noise=0.5, draws=3, seed=4, max_rows=5)
    kinds = ["resid", "attn"] if style == "shortformer" else ["resid", "mlp", "attn"]
    assert list(table.columns) == COLUMNS
    assert list(dict.fromkeys(table.kind)) == kinds
    for kind in kinds:
        wanted = torch.tensor(plain(model, tokens, subject, answer, noise, kind, window), dtype=torch.float64)
        rows = table[table.kind == kind].sort_values(["layer", "position"])
        assert rows[["layer", "position"]].values.tolist() == [[layer, at] for layer in range(3) for at in range(4)]
        assert torch.allclose(torch.tensor(rows.effect.values), wanted.mean(-1).flatten(), rtol=0, atol=1e-10)
        half = 4.302653 * wanted.std(-1).flatten() / 3**0.5
        for end in (rows.ci_high - rows.effect, rows.effect - rows.ci_low):
            assert torch.allclose(torch.tensor(end.values), half, rtol=1e-4, atol=1e-10)
        assert wanted.abs().max() > 1e-6  # hosts without norms are sure of their answer
    assert table.p_clean.iloc[0] == pytest.approx(model(tokens)[0, -1].softmax(-1)[answer].item(), rel=1e-9)
    assert table.p_clean.nunique() == table.p_corrupted.nunique() == 1
    assert table.token.tolist() == [str(token) for token in tokens[0].tolist()] * (3 * len(kinds))


def test_the_last_residual_stream_decides_alone() -> None:
    model, tokens = tiny_host(), tiny_tokens(1, 5)
    table = causal_trace(model, tokens, [1], 2, kinds=["resid"])
    last = table[table.layer == 1]
    assert last.effect.tolist() == pytest.approx(
        [0, 0, 0, 0, last.p_clean.iloc[0] - last.p_corrupted.iloc[0]], abs=1e-12
    )
    assert table[table.position == 0].effect.abs().max() < 1e-12  # before the subject nothing is corrupted
    assert table.ci_low.le(table.effect).all()
    assert table.draws.eq(10).all()


def test_stacks_are_bounded_and_begin_where_passes_first_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, own = [], passes.Passes.resume

    def watched(self: passes.Passes, layer: int, start: object, hooks: Sequence = ()) -> Tensor:
        seen.append((layer, start.resid.shape[0]))
        return own(self, layer, start, hooks)

    monkeypatch.setattr(passes.Passes, "resume", watched)
    model, tokens = tiny_host(n_layers=4), tiny_tokens(1, 5)
    few = causal_trace(model, tokens, [0], 2, draws=3, window=3, kinds=["resid", "mlp"], max_rows=7)
    stacks = [(layer, rows) for layer in (1, 2, 3, 4, 0, 0, 1, 2) for rows in (7, 7, 1)]
    assert seen == [(4, 1), (4, 3), *stacks]
    many = causal_trace(model, tokens, [0], 2, draws=3, window=3, kinds=["resid", "mlp"])
    assert (few.effect - many.effect).abs().max() < 1e-12


def test_noise_is_scaled_by_all_entries_of_the_embedding_and_made_from_the_seed() -> None:
    model = tiny_host()
    state = torch.get_rng_state()
    noise = noise_draws(model, 2, 4000, 3.0, seed=0)
    assert torch.equal(state, torch.get_rng_state())
    W_E = model.embed.W_E.detach()
    scale = 3 * ((W_E - W_E.mean()).square().sum() / W_E.numel()).sqrt().item()
    assert noise.shape == (4000, 2, 6)
    assert noise.std().item() == pytest.approx(scale, rel=0.02)
    assert abs(noise.mean().item()) < 0.02 * scale
    assert torch.equal(noise, noise_draws(model, 2, 4000, 3.0, seed=0))
    assert not torch.allclose(noise, noise_draws(model, 2, 4000, 3.0, seed=1), atol=0.1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_subject_given_as_text(side: str) -> None:
    model = tiny_host()
    model.set_tokenizer(tiny_tokenizer(side))
    with unchanged(model):
        table = causal_trace(model, "w0 w3 w1 w2", "w3 w1", "w5", draws=2, seed=1)
    by_hand = causal_trace(model, torch.tensor([[1, 2, 5, 3, 4]]), [2, 3], 7, draws=2, seed=1)
    assert table.token.tolist()[:5] == ["[BOS]", "w0", "w3", "w1", "w2"]
    assert table.equals(by_hand)
    with pytest.raises(ValueError, match="'w3' is text and the prompt is tokens"):
        causal_trace(model, tiny_tokens(1), "w3", 1)


def byte_tokenizer(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """Bytes with a few merges, and a space in front of a word in its first token, as GPT-2 has it."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges), "<|end|>"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def test_finding_subjects_in_pieces_of_words() -> None:
    model = tiny_host(d_vocab=300, n_ctx=20)
    model.set_tokenizer(byte_tokenizer(("Ġ", "b"), ("Ġb", "c"), ("d", "e")))
    assert model.to_str_tokens("ab bcde a") == ["<|end|>", "a", "b", " bc", "de", " ", "a"]
    for subject, wanted in {"bcde": [3, 4], " bcde ": [3, 4], "bc": [3], "ab bc": [1, 2, 3], "de a": [4, 5, 6]}.items():
        assert find_subject(model, "ab bcde a", subject) == wanted
    assert find_subject(model, "aé b", "é") == [2, 3]  # one letter of two bytes
    for subject, message in {
        "x": "'x' is not in the prompt",
        "BC": "is not in the prompt",
        " ": "is not in the prompt",
        "a": "more than once",
        "b bcd": r"does not begin and end where tokens .* \['b', ' bc', 'de'\]",
        "cd": r"\[' bc', 'de'\]",
        "e a": r"\['de', ' ', 'a'\]",
    }.items():
        with pytest.raises(ValueError, match=message):
            find_subject(model, "ab bcde a", subject)
    with pytest.raises(ValueError, match="more than once"):
        find_subject(model, "bbb", "bb")  # also where the two overlap


def test_a_tokenizer_that_cannot_tell_places() -> None:
    model = tiny_host()
    model.set_tokenizer(tiny_tokenizer("right"))
    model.to_tokens = lambda text, truncate: torch.tensor([[2, 1]])
    with pytest.raises(ValueError, match=r"\[2, 1\] of 'w0' do not end with its own \[2\]"):
        find_subject(model, "w0", "w0")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"subject": []}, "one or more different positions of 0 to 4"),
        ({"subject": [1, 1]}, r"subject=\[1, 1\]"),
        ({"subject": [5]}, "positions of 0 to 4"),
        ({"subject": [-1]}, "positions of 0 to 4"),
        ({"kinds": ["resid", "head"]}, "no states of kind 'head'; it has .*resid.*mlp.*attn"),
        ({"window": 0}, "at least 1 and noise above 0"),
        ({"draws": 0}, "at least 1"),
        ({"max_rows": 0}, "at least 1"),
        ({"noise": 0.0}, "noise above 0"),
        ({"answer": 11}, "Token 11"),
    ],
)
def test_what_is_refused(changes: dict, message: str) -> None:
    model = tiny_host()
    with unchanged(model), pytest.raises(ValueError, match=message):
        causal_trace(model, **{"prompt": tiny_tokens(1), "subject": [1], "answer": 2, **changes})
