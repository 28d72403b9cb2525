"""The paper's induction task and the training of the two-layer model that is later decomposed.

A sequence holds two s tokens: s1 at a random place and s2 at the end. The model must answer, at s2, the token
m that followed s1. The circuit to be learnt has two steps: m attends to s1 in layer 0 (and so learns that it
follows an s), then s2 attends to m in layer 1 and copies it.

1. `InductionTask.sample` draws sequences; `build_target` makes the untrained HookedTransformer.
2. `train_target` trains it with cross-entropy on the last position only. No loss looks at the attention.
3. `attention_of_circuit` measures on held-out sequences whether the circuit is there.

Source: the induction experiment of the paper on SPD for Transformers (2 layers, 1 head each, attention only,
d_model 16, shortformer positions, no layer norm). Where this departs from the paper: the paper trains 100,000
steps of batch 1024 at a constant learning rate with one weight decay; here ten thousand steps of batch 64 have
to do, and `TargetSettings` says what makes them enough: weight decays by parameter, an s token that can be told
from the others, and null keys beside the real ones. The attention biases of TransformerLens stay at
exactly zero: a learnt b_Q would do the work of W_Q without ever being decomposed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from tqdm.auto import tqdm

from tl_spd.checks import check_whole
from tl_spd.sites import HookedTransformer, HookedTransformerConfig

HELD_OUT_SEED = 7_919  # added to the training seed, so that held-out sequences are other ones
TRAIN_SEED = 1_000_003
SMOOTHING_STEPS = 50  # width of the running mean that `phase_change_step` looks at
LARGEST = 2 * 10**8  # numbers in embeddings and causal mask: more are a mistake, or a trap in a stranger's settings


@dataclass(frozen=True)
class InductionTask:
    """Sequences of `length` tokens: uniform ones from `0..vocab-1`, and the s token (id `vocab`) twice.

    Source: the paper's induction data. `vocab` counts ordinary tokens only; the model's d_vocab is `vocab +
    1`.
    """

    vocab: int = 128
    length: int = 64

    def __post_init__(self) -> None:
        if self.vocab < 1 or self.length < 3:
            raise ValueError(
                "InductionTask: vocab must be at least 1 and length at least 3 (s, m and the final s), "
                f"found {self.vocab} and {self.length}."
            )
        if (numbers := 34 * self.vocab + self.length**2) > LARGEST:
            raise ValueError(
                f"InductionTask: a model for vocab {self.vocab} and length {self.length} holds {numbers:.1e} numbers; "
                f"at most {LARGEST:.0e} are allowed."
            )

    @property
    def s_token(self) -> int:
        """Id of the s token."""
        return self.vocab

    @property
    def d_vocab(self) -> int:
        """Number of token ids, the s token included."""
        return self.vocab + 1

    def sample(
        self, batch: int, generator: torch.Generator
    ) -> tuple[Int[torch.Tensor, "batch pos"], Int[torch.Tensor, " batch"], Int[torch.Tensor, " batch"]]:
        """Draw `batch` sequences.

        Returns tokens, the answer (the token m right after the first s) and the position of the first s,
        uniform on `0..length-3`, so that m never is the final s. All randomness comes from `generator`.
        """
        if batch < 1:
            raise ValueError(f"batch must be at least 1 sequence, found {batch}.")
        device = generator.device
        tokens = torch.randint(0, self.vocab, (batch, self.length), generator=generator, device=device)
        s1 = torch.randint(0, self.length - 2, (batch,), generator=generator, device=device)
        tokens.scatter_(1, s1[:, None], self.s_token)
        tokens[:, -1] = self.s_token
        answers = tokens.gather(1, s1[:, None] + 1)[:, 0]
        return tokens, answers, s1


# Learning-rate factors and final weight decays by parameter. Two ways to be right without the circuit have to
# be closed. Noise: token embeddings enter layer 0's queries and keys, so positions must outgrow them (W_E
# slow and decayed, W_pos fast and free). Gain: layer 0 may stay blurred while V, O and layer 1 amplify what
# little of s arrives, so what amplifies is decayed and layer 0's W_Q, W_K are not. W_U and layer 1's V, O
# keep a small decay, so that the cross-entropy, and with it the gradient, does not vanish. The s token's row
# of W_E is never decayed: were it as small as the others, it would drown in the positions, and no function of
# layer 0's inputs could say which token is s.
_LR_FACTOR = {"embed.W_E": 0.3, "pos_embed.W_pos": 2.0}
_WEIGHT_DECAY = {
    "embed.W_E": 0.6,
    "blocks.0.attn.W_V": 0.3,
    "blocks.0.attn.W_O": 0.3,
    "blocks.1.attn.W_Q": 0.15,
    "blocks.1.attn.W_K": 0.15,
    "blocks.1.attn.W_V": 0.05,
    "blocks.1.attn.W_O": 0.05,
    "unembed.W_U": 0.05,
}


@dataclass(frozen=True)
class TargetSettings:
    """How `train_target` trains. The defaults are the "quick" preset.

    The learning rate rises linearly for `warmup_steps`, stays at `lr`, and falls linearly to 0 over the last
    `decay_fraction` of the steps. Weight decay is 0 until step `decay_from` and rises linearly to its full
    value over `decay_ramp` steps, since decay before the phase change delays it. Parameters that `lr_factor`
    does not name have factor 1, those that `weight_decay` does not name have none. The `*_std` are standard
    deviations at initialisation, `s_norm` is the norm of the s token's embedding there; `qk_gain` scales W_Q
    and W_K down from 1/sqrt(d_model): where attention starts peaked, layer 1 learns to prefer a few positions
    by themselves and layer 0 never learns those.

    `null_keys` is how many further keys of score 0 and value 0 every query of both layers sees while training
    (risen to like the weight decay); the trained model has none. A softmax does not feel a shift of all its
    scores, so without them m may find s1 only because all other keys score far below 0, and then every one of
    those keys matters. With them the key that is sought must score well above 0.

    `eps` is Adam's. Far smaller, gradients that have all but vanished still make whole steps, and layer 1 may
    grow so sure of m that a decomposition gets no gradient where it errs.

    `qk_rank` is how many of the 16 dimensions of layer 0's head its queries and keys use. The others start at zero
    in W_Q and in W_K, where no gradient ever reaches them.
    """

    seed: int = 0
    steps: int = 10_000
    batch_size: int = 64
    lr: float = 5e-3
    warmup_steps: int = 200
    decay_fraction: float = 0.3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decay_from: int = 2_500
    decay_ramp: int = 2_000
    embed_std: float = 0.3
    pos_std: float = 0.7
    s_norm: float = 4.0
    qk_gain: float = 0.3
    null_keys: float = 256.0
    qk_rank: int = 16
    log_every: int = 250
    lr_factor: Mapping[str, float] = field(default_factory=lambda: dict(_LR_FACTOR))
    weight_decay: Mapping[str, float] = field(default_factory=lambda: dict(_WEIGHT_DECAY))

    def __post_init__(self) -> None:
        check_whole(qk_rank=self.qk_rank)
        for name in ("steps", "batch_size", "log_every", "warmup_steps", "decay_ramp"):
            if getattr(self, name) < 1:
                raise ValueError(f"TargetSettings: {name} must be at least 1, found {getattr(self, name)}.")
        if not 0 <= self.lr < math.inf:
            raise ValueError(f"TargetSettings: lr must be a number of at least 0, found {self.lr}.")
        if not self.null_keys >= 0:
            raise ValueError(f"TargetSettings: null_keys must be at least 0, found {self.null_keys}.")
        if not 1 <= self.qk_rank <= 16:
            raise ValueError(f"TargetSettings: qk_rank must be 1 to 16, found {self.qk_rank}.")
        if not 0 <= self.decay_fraction <= 1:
            raise ValueError(f"TargetSettings: decay_fraction must be 0 to 1, found {self.decay_fraction}.")

    @classmethod
    def preset(cls, name: str, seed: int = 0) -> TargetSettings:
        """Settings by name: "quick" (about a minute on an idle core) or "cpu" (three times as long)."""
        presets = {"quick": cls(seed=seed), "cpu": cls(seed=seed, steps=30_000)}
        if name not in presets:
            raise ValueError(f"No preset {name!r}; there are {sorted(presets)}.")
        return presets[name]

    def lr_at(self, step: int) -> float:
        """Learning rate at `step` (0-based), before `lr_factor`."""
        left = (self.steps - step) / max(1.0, self.decay_fraction * self.steps)
        return self.lr * min(1.0, (step + 1) / self.warmup_steps, left)

    def decay_share_at(self, step: int) -> float:
        """Share of the final weight decay and null keys that applies at `step`, 0..1."""
        return min(1.0, max(0.0, (step - self.decay_from) / self.decay_ramp))


@dataclass(frozen=True)
class TargetResult:
    """A trained target and what is known about it.

    history: one row per `log_every` steps: `step`; `loss` (nats) and `accuracy`, means over the training
    batches since the row before; `lr`; `attention_m_on_s1`, `attention_s2_on_m` on held-out sequences.
    phase_change_step: first step (1-based) at which the mean training accuracy of the last 50 steps passes
    0.5; None if it never did. Accuracy jumps from chance to near 1 within some hundred steps, so the
    threshold matters little.
    attention_m_on_s1, attention_s2_on_m, accuracy: of the trained model on 4096 held-out sequences, all in
    0..1.
    """

    model: HookedTransformer
    history: pd.DataFrame
    phase_change_step: int | None
    attention_m_on_s1: float
    attention_s2_on_m: float
    accuracy: float

    def found(self) -> dict[str, Any]:
        """What is known of it, for JSON."""
        names = ("accuracy", "attention_m_on_s1", "attention_s2_on_m", "phase_change_step")
        return {name: getattr(self, name) for name in names}


def build_target(
    task: InductionTask,
    seed: int,
    embed_std: float = 0.3,
    pos_std: float = 0.7,
    s_norm: float = 4.0,
    qk_gain: float = 0.3,
    qk_rank: int = 16,
) -> HookedTransformer:
    """The untrained target: 2 layers of 1 head, attention only, d_model = d_head = 16, shortformer, no norm.

    Weights are normal: W_E and W_pos with the given standard deviations, W_Q and W_K with `qk_gain`/sqrt(16),
    the rest with 1/sqrt(16); the s token's embedding is scaled to norm `s_norm`; in layer 0's W_Q and W_K only the
    first `qk_rank` dimensions of the head are not zero. Every bias is zero and frozen.
    Draws from a Generator of its own; torch's global one is untouched.
    """
    config = HookedTransformerConfig(
        n_layers=2, n_heads=1, d_model=16, d_head=16, n_ctx=task.length, d_vocab=task.d_vocab, attn_only=True,
        positional_embedding_type="shortformer", normalization_type=None, init_weights=False, device="cpu",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        model = HookedTransformer(config)
    generator = torch.Generator().manual_seed(seed)
    base = 1 / math.sqrt(config.d_model)
    std = {"W_E": embed_std, "W_pos": pos_std, "W_Q": qk_gain * base, "W_K": qk_gain * base}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if leaf.startswith("b_"):
                parameter.zero_().requires_grad_(False)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std.get(leaf, base))
        embedding_of_s = model.embed.W_E[task.s_token]
        embedding_of_s *= s_norm / embedding_of_s.norm()
        for weight in (model.blocks[0].attn.W_Q, model.blocks[0].attn.W_K):
            weight[..., qk_rank:] = 0
    return model


def fast_forward(
    model: HookedTransformer, tokens: Int[torch.Tensor, "batch pos"], null_keys: float = 0.0
) -> tuple[
    Float[torch.Tensor, "batch d_vocab"],
    Float[torch.Tensor, "batch query key"],
    Float[torch.Tensor, "batch key"],
]:
    """Last-position logits, layer 0's pattern and the last row of layer 1's, of a model by `build_target`.

    Equals the HookedTransformer's own forward (its biases are zero), but computes only the last query of
    layer 1 and never forms its keys and values: that is what makes training short. Gradients reach the
    model's own parameters. With `null_keys` every query also sees that many keys of score 0 and value 0, and
    the patterns sum to less than 1.
    """
    first, second = model.blocks[0].attn, model.blocks[1].attn
    positions = model.pos_embed.W_pos[: tokens.shape[1]]
    causal = torch.full((tokens.shape[1],) * 2, -math.inf, device=tokens.device).triu(1)
    embedded = F.embedding(tokens, model.embed.W_E)
    with_positions = embedded + positions  # shortformer: positions enter queries and keys, not values
    query = with_positions @ first.W_Q[0] / first.attn_scale
    pattern0 = _softmax(torch.baddbmm(causal, query, (with_positions @ first.W_K[0]).mT), null_keys)
    resid = embedded + pattern0 @ (embedded @ first.W_V[0]) @ first.W_O[0]
    with_positions = resid + positions
    # One query against all keys: move W_K to the query's side, so that the keys need not be formed.
    query = with_positions[:, -1] @ second.W_Q[0] @ second.W_K[0].mT / second.attn_scale
    pattern1 = _softmax((with_positions @ query[:, :, None])[..., 0], null_keys)
    read = (pattern1[:, None] @ resid)[:, 0]  # likewise for the values
    logits = (resid[:, -1] + read @ second.W_V[0] @ second.W_O[0]) @ model.unembed.W_U
    return logits, pattern0, pattern1


def _softmax(scores: torch.Tensor, null_keys: float) -> torch.Tensor:
    """Softmax over the last axis beside `null_keys` further scores of 0, whose share is left out."""
    if null_keys == 0:
        return scores.softmax(-1)
    null = scores.new_full((*scores.shape[:-1], 1), math.log(null_keys))
    return torch.cat([scores, null], dim=-1).softmax(-1)[..., :-1]


@torch.no_grad()
def attention_of_circuit(
    model: HookedTransformer, task: InductionTask, n: int, generator: torch.Generator
) -> tuple[float, float]:
    """Mean attention (0..1) of m on s1 in layer 0 and of s2 on m in layer 1, over `n` fresh sequences.

    Reads the model's own `hook_pattern`, so it holds for any two-layer, one-head HookedTransformer,
    decomposed or not.
    """
    tokens, _, s1 = task.sample(n, generator)
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(2)]
    _, cache = model.run_with_cache(tokens, names_filter=names, return_type=None)
    row = torch.arange(n)
    m_on_s1 = cache[names[0]][row, 0, s1 + 1, s1]
    s2_on_m = cache[names[1]][row, 0, -1, s1 + 1]
    return m_on_s1.mean().item(), s2_on_m.mean().item()


@torch.no_grad()
def accuracy_of_target(model: HookedTransformer, task: InductionTask, n: int, generator: torch.Generator) -> float:
    """Share (0..1) of `n` fresh sequences whose most likely next token is the answer."""
    tokens, answers, _ = task.sample(n, generator)
    return (model(tokens)[:, -1].argmax(-1) == answers).float().mean().item()


def _phase_change(accuracies: list[float]) -> int | None:
    """First 1-based step whose mean over the last SMOOTHING_STEPS accuracies passes 0.5; None if never."""
    smoothed = pd.Series(accuracies).rolling(SMOOTHING_STEPS).mean()
    passed = smoothed.index[smoothed > 0.5]
    return int(passed[0]) + 1 if len(passed) else None


def _optimiser(model: HookedTransformer, settings: TargetSettings) -> torch.optim.Adam:
    """Adam with one group per trained parameter; a group keeps its name."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    unknown = (set(settings.lr_factor) | set(settings.weight_decay)) - set(trained)
    if unknown:
        raise ValueError(
            f"TargetSettings: lr_factor and weight_decay may name the trained parameters {sorted(trained)}, "
            f"found {sorted(unknown)}."
        )
    groups = [{"params": [parameter], "name": name} for name, parameter in trained.items()]
    return torch.optim.Adam(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


@torch.no_grad()
def _decay(groups: list[dict[str, Any]], settings: TargetSettings, share: float, s_token: int) -> None:
    """Weight decay beside the gradient (AdamW's), `share` of the full one; the s token's embedding has none."""
    for group in groups:
        (parameter,) = group["params"]
        decayed = parameter[:s_token] if group["name"] == "embed.W_E" else parameter
        decayed *= 1 - group["lr"] * share * settings.weight_decay.get(group["name"], 0.0)


def train_target(task: InductionTask, settings: TargetSettings, progress: bool = True) -> TargetResult:
    """Train a target on the task's cross-entropy (nats) at the last position, and measure its circuit.

    The same settings give the same target on the same machine and thread count. Batches of 64 are small: with
    `torch.set_num_threads(1)` training is nearly as fast and two seeds fit on two cores.
    """
    names = ("seed", "embed_std", "pos_std", "s_norm", "qk_gain", "qk_rank")
    model = build_target(task, **{name: getattr(settings, name) for name in names})
    optimiser = _optimiser(model, settings)
    generator = torch.Generator().manual_seed(settings.seed + TRAIN_SEED)
    losses: list[float] = []
    accuracies: list[float] = []
    rows: list[dict[str, float]] = []
    bar = tqdm(range(settings.steps), disable=not progress, desc="induction target")
    for step in bar:
        lr, decay_share = settings.lr_at(step), settings.decay_share_at(step)
        for group in optimiser.param_groups:
            group["lr"] = lr * settings.lr_factor.get(group["name"], 1.0)
        tokens, answers, _ = task.sample(settings.batch_size, generator)
        logits = fast_forward(model, tokens, decay_share * settings.null_keys)[0]
        loss = F.cross_entropy(logits, answers)
        optimiser.zero_grad()
        loss.backward()
        _decay(optimiser.param_groups, settings, decay_share, task.s_token)
        optimiser.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(
                f"Step {step}: the target's loss was not finite. Try a smaller lr in TargetSettings."
            )
        accuracies.append((logits.argmax(-1) == answers).float().mean().item())
        if (step + 1) % settings.log_every == 0 or step + 1 == settings.steps:
            since = slice(int(rows[-1]["step"]) if rows else 0, None)
            held_out = torch.Generator().manual_seed(settings.seed + HELD_OUT_SEED)
            m_on_s1, s2_on_m = attention_of_circuit(model, task, 512, held_out)
            rows.append({
                "step": step + 1, "loss": _mean(losses[since]), "accuracy": _mean(accuracies[since]),
                "lr": lr, "attention_m_on_s1": m_on_s1, "attention_s2_on_m": s2_on_m,
            })  # fmt: skip
            bar.set_postfix(loss=f"{rows[-1]['loss']:.4f}", m_on_s1=f"{m_on_s1:.3f}")
    held_out = torch.Generator().manual_seed(settings.seed + HELD_OUT_SEED)
    m_on_s1, s2_on_m = attention_of_circuit(model, task, 4096, held_out)
    accuracy = accuracy_of_target(model, task, 4096, held_out)
    return TargetResult(model, pd.DataFrame(rows), _phase_change(accuracies), m_on_s1, s2_on_m, accuracy)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
