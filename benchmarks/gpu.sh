#!/usr/bin/env bash
# The benchmarks on a CUDA machine, in under five minutes: bash benchmarks/gpu.sh (after the README's set-up, with a CUDA torch).
# Benchmarks choose the GPU by themselves; results land in benchmarks/results/*_cuda.* with its name in them.
set -euo pipefail
cd "$(dirname "$0")/.."
timeout 90 python -m benchmarks.importance_speed --lengths 16 64 1024 10240 --rounds 3
timeout 80 python -m benchmarks.step --rounds 5 --gpt2-layers 2
timeout 60 python -m benchmarks.overhead --rounds 5
timeout 60 python -m pytest -q tests -m gpu
