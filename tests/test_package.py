"""The public surface, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import tl_spd as spd

PUBLIC = [
    "Attention", "Components", "Directions", "Faithfulness", "FaithfulnessWarmup", "HooksRemovedError",
    "ImportanceMinimality", "ImportanceSpec", "Importances", "Leak", "LossTerm", "MemoryEstimate", "NonFiniteLossError",
    "Optimizer", "Pass", "Recon", "ReconLayerwise", "ReconPartial", "ReconTerm", "Run", "Scalar", "Schedule", "Settings",
    "Shared", "Step", "StochasticRecon", "StochasticReconLayerwise", "StochasticReconPartial", "StorageError",
    "TooLargeError", "Vector", "decompose", "decomposed", "estimate_memory", "load", "paper_losses", "suppressed",
    "suppressed_copy", "suppressed_directions",
]  # fmt: skip


def test_the_public_names_are_these() -> None:
    modules = {name for name in vars(spd) if f"tl_spd.{name}" in sys.modules}
    names = {name for name in vars(spd) if not name.startswith("_")} - modules
    assert sorted(names - {"jaxtyping"}) == sorted(PUBLIC)  # put there by the shape-checking import hook


def test_importing_does_nothing_to_torch_and_loads_no_heavy_extra() -> None:
    code = """
import sys, torch, transformer_lens
state, threads, dtype = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
before = set(sys.modules)
import tl_spd
assert torch.equal(state, torch.get_rng_state()) and threads == torch.get_num_threads()
assert dtype == torch.get_default_dtype() and torch.is_grad_enabled()
heavy = {name.split(".")[0] for name in set(sys.modules) - before} & {"matplotlib", "plotly", "gguf", "tyro", "circuitsvis"}
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
