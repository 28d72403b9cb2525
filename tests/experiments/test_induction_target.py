"""The induction task's data, the untrained target, its fast forward pass, and a short training."""

import dataclasses

import pytest
import torch

from tl_spd.experiments.induction_target import (
    InductionTask,
    TargetSettings,
    _phase_change,
    accuracy_of_target,
    attention_of_circuit,
    build_target,
    fast_forward,
    train_target,
)

TASK = InductionTask()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_sequence_is_as_the_paper_describes_it() -> None:
    tokens, answers, s1 = TASK.sample(500, generator())
    assert tokens.shape == (500, 64)
    assert answers.shape == s1.shape == (500,)
    for row, answer, place in zip(tokens.tolist(), answers.tolist(), s1.tolist(), strict=True):
        assert [i for i, token in enumerate(row) if token == 128] == [place, 63]
        assert row[place + 1] == answer
        assert place <= 61
        assert all(0 <= token < 128 for i, token in enumerate(row) if i not in (place, 63))


def test_places_and_tokens_are_uniform() -> None:
    _, answers, s1 = TASK.sample(62_000, generator(1))
    places = torch.bincount(s1, minlength=64)
    assert places[62:].sum() == 0
    # 1000 expected each, standard deviation 31.5
    assert places[:62].min() > 850
    assert places[:62].max() < 1150
    # 484 expected each, standard deviation 22
    counts = torch.bincount(answers, minlength=128)
    assert len(counts) == 128
    assert counts.min() > 370
    assert counts.max() < 600


def test_shortest_sequence_by_hand() -> None:
    tokens, answers, s1 = InductionTask(vocab=1, length=3).sample(4, generator())
    assert tokens.tolist() == [[1, 0, 1]] * 4
    assert answers.tolist() == [0] * 4
    assert s1.tolist() == [0] * 4


def test_randomness_comes_from_the_generator_alone() -> None:
    before = torch.random.get_rng_state()
    one, two, other = (TASK.sample(8, generator(seed)) for seed in (3, 3, 4))
    models = [build_target(TASK, seed) for seed in (3, 3, 4)]
    train_target(TASK, TargetSettings(steps=2, batch_size=4), progress=False)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one[0], other[0])
    weights = [model.blocks[0].attn.W_Q for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="length at least 3"):
        InductionTask(length=2)
    for size in (dict(vocab=10**8), dict(length=10**5)):  # 3.4e9 and 1e10 numbers
        with pytest.raises(ValueError, match="at most 2e"):
            InductionTask(**size)
    with pytest.raises(ValueError, match="at least 1"):
        TASK.sample(0, generator())
    with pytest.raises(ValueError, match="quick"):
        TargetSettings.preset("fast")
    with pytest.raises(ValueError, match="null_keys"):
        TargetSettings(null_keys=-1.0)
    with pytest.raises(ValueError, match="W_Z"):
        train_target(TASK, TargetSettings(steps=1, weight_decay={"W_Z": 1.0}), progress=False)


def test_the_target_is_the_papers_model() -> None:
    cfg = build_target(TASK, 0).cfg
    assert (cfg.n_layers, cfg.n_heads, cfg.d_model, cfg.d_head, cfg.d_vocab) == (2, 1, 16, 16, 129)
    assert cfg.attn_only
    assert cfg.normalization_type is None
    assert cfg.positional_embedding_type == "shortformer"


def test_fast_forward_equals_the_hooked_transformer() -> None:
    model = build_target(TASK, 5, embed_std=1.0, pos_std=1.0, qk_gain=2.0)  # peaked: stricter
    tokens, answers, _ = TASK.sample(32, generator(5))
    slow, cache = model.run_with_cache(tokens)
    logits, pattern0, pattern1 = fast_forward(model, tokens)
    torch.testing.assert_close(logits, slow[:, -1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pattern0, cache["pattern", 0][:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pattern1, cache["pattern", 1][:, 0, -1], atol=1e-5, rtol=1e-5)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = torch.nn.functional.cross_entropy
    fast_gradients = torch.autograd.grad(loss(logits, answers), trained)
    slow_gradients = torch.autograd.grad(loss(slow[:, -1], answers), trained)
    for fast, slow_gradient in zip(fast_gradients, slow_gradients, strict=True):
        torch.testing.assert_close(fast, slow_gradient, atol=1e-5, rtol=1e-4)


def test_null_keys_are_keys_of_score_zero_and_value_zero() -> None:
    model = build_target(TASK, 6)
    tokens, _, _ = TASK.sample(8, generator(6))
    scores = model.run_with_cache(tokens)[1]["attn_scores", 0][:, 0].exp()  # masked scores are -inf
    beside = scores.sum(-1, keepdim=True) + 5.0
    torch.testing.assert_close(fast_forward(model, tokens, 5.0)[1], scores / beside, atol=1e-6, rtol=1e-5)


def test_weights_decay_but_for_the_s_token_where_gradients_vanish() -> None:
    settings = TargetSettings(steps=3, batch_size=4, lr=0.1, warmup_steps=1, decay_from=0, decay_ramp=1, eps=1e9)
    start, end = build_target(TASK, 0), train_target(TASK, settings, progress=False).model
    kept = 1.0
    for step in range(3):  # Adam's own steps are nothing beside its eps
        kept *= 1 - settings.lr_at(step) * 0.3 * settings.decay_share_at(step) * 0.6
    torch.testing.assert_close(end.W_E[:128], start.W_E[:128] * kept)
    torch.testing.assert_close(end.W_E[128], start.W_E[128])
    assert kept < 0.99
    assert start.W_E[128].norm().item() == pytest.approx(settings.s_norm)


def test_a_short_training_moves_weights_and_leaves_biases_at_zero() -> None:
    settings = TargetSettings(steps=60, batch_size=16, log_every=25, decay_from=0)
    result = train_target(TASK, settings, progress=False)
    start = dict(build_target(TASK, settings.seed).named_parameters())
    for name, parameter in result.model.named_parameters():
        if ".b_" in name:
            assert not parameter.requires_grad
            assert torch.count_nonzero(parameter) == 0
        else:
            assert not torch.equal(parameter, start[name])
    assert result.history["step"].tolist() == [25, 50, 60]
    assert result.phase_change_step is None
    again = train_target(TASK, settings, progress=False)
    assert torch.equal(again.model.W_E, result.model.W_E)


@pytest.mark.parametrize("rank", [1, 3, 16])
def test_qk_rank_holds_through_the_training(rank: int) -> None:
    settings = TargetSettings(steps=60, batch_size=16, decay_from=0, qk_rank=rank)
    model = train_target(TASK, settings, progress=False).model
    for layer, ranks in enumerate((rank, 16)):
        attn = model.blocks[layer].attn
        for weight in (attn.W_Q, attn.W_K):
            assert torch.linalg.matrix_rank(weight[0].double()) == ranks
    with pytest.raises(ValueError, match="qk_rank must be 1 to 16, found 17"):
        TargetSettings(qk_rank=17)


def test_a_small_task_is_learnt() -> None:
    task = InductionTask(vocab=4, length=6)
    settings = TargetSettings(steps=800, batch_size=64, decay_from=10_000, pos_std=1.0)
    result = train_target(task, settings, progress=False)
    assert result.accuracy > 0.9
    assert result.phase_change_step is not None
    assert 50 <= result.phase_change_step < 800


def test_phase_change_is_the_first_step_whose_running_mean_passes_one_half() -> None:
    assert _phase_change([0.0] * 100 + [1.0] * 100) == 126  # 26 of the last 50 are right
    assert _phase_change([0.4] * 200) is None


def hand_made_circuit() -> torch.nn.Module:
    """Three positions, one-hot codes: s1 at 0, m at 1, s2 at 2; attention by position alone."""
    model = build_target(InductionTask(length=3), 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.pos_embed.W_pos[:, :3] = torch.eye(3)
        first, second = (model.blocks[layer].attn for layer in range(2))
        # scores are q.k / sqrt(16): 4 log 3 gives exp(score) = 3 on the wanted key and 1 elsewhere
        first.W_Q[0, 1, 0] = second.W_Q[0, 2, 0] = 1.0
        first.W_K[0, 0, 0] = second.W_K[0, 1, 0] = 4 * torch.log(torch.tensor(3.0))
    return model


def test_attention_measure_on_a_pattern_known_by_hand() -> None:
    task = InductionTask(length=3)
    m_on_s1, s2_on_m = attention_of_circuit(hand_made_circuit(), task, 16, generator())
    assert m_on_s1 == pytest.approx(3 / 4, abs=1e-6)  # m sees s1, itself
    assert s2_on_m == pytest.approx(3 / 5, abs=1e-6)  # s2 sees s1, m, itself


def test_accuracy_of_a_constant_answer() -> None:
    model = hand_made_circuit()  # all logits equal: argmax is token 0
    task = InductionTask(length=3)
    answers = task.sample(5_000, generator(2))[1]
    expected = (answers == 0).float().mean().item()
    assert accuracy_of_target(model, task, 5_000, generator(2)) == pytest.approx(expected)


def test_schedules_at_the_ends() -> None:
    settings = TargetSettings(steps=1000, lr=1.0, warmup_steps=10, decay_fraction=0.5, decay_from=100, decay_ramp=200)
    assert settings.lr_at(0) == pytest.approx(0.1)
    assert settings.lr_at(9) == settings.lr_at(500) == 1.0
    assert settings.lr_at(750) == pytest.approx(0.5)
    assert settings.lr_at(999) == pytest.approx(0.002)
    assert [settings.decay_share_at(step) for step in (0, 100, 200, 300, 999)] == [0, 0, 0.5, 1, 1]
    assert dataclasses.replace(settings, seed=4).seed == 4
