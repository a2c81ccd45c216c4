#!/bin/bash
# Trains the network of the spec `ranks-ddp` on two GPUs under DistributedDataParallel: ddp.sh EXPERIMENTS PYTHON PORT MODE.
# EXPERIMENTS is the program `experiments`, whose trainer writes the weights and the data into the current directory.
set -e
"$1" trainer start -o start.safetensors --dataset digits --hidden 1024 --batch 512 --epochs 6 >&2
exec "$2" -m torch.distributed.run --nproc-per-node 2 --master-port "$3" "$(dirname "$0")/ddp_mlp.py" \
  --start-file start.safetensors --mode "$4" --lr 0.05
