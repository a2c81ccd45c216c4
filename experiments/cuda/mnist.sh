#!/bin/bash
# Runs a program on MNIST in the current directory: mnist.sh DIR PROGRAM [ARGUMENT...]. DIR has the data set's four files,
# which are unpacked here. mlp.txt is the configuration of cuda_mlp.
set -e
for name in train-images-idx3-ubyte train-labels-idx1-ubyte t10k-images-idx3-ubyte t10k-labels-idx1-ubyte; do
  gunzip -kc "$1/$name.gz" > $name
done
printf '%s\n' data_dir=. num_layers=4 feat_dim=784 log_dir=./log num_epochs=2 bsz=64 learning_rate=0.1 verbose=0 time_epoch=1 > mlp.txt
shift
exec "$@"
