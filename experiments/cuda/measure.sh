#!/bin/bash
# Runs unchanged CUDA programs without and under `vramlab run` and writes a record: measure.sh OUT [SECONDS] [PART...]
#
# PART is check, torch, python, programs or raw; without one all run. Needs a GPU, nvcc, and `vramlab` with libvramlab_inject.so
# beside it (VRAMLAB, default target/release/vramlab). CuPy, RMM, JAX and PyTorch are measured where Python has them; cuda_mlp
# (github.com/Lawrencium77/cuda_mlp) and cuda-mnist (github.com/andylolu2/cuda-mnist) where CUDA_MLP and CUDA_MNIST name the built
# programs and MNIST the directory of the data set. SECONDS (580) limits the whole; what is reached enters OUT/any-program.txt. BUILD names the
# commit where the repository is not there.
START=$(date +%s)
HERE=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" && OUT=$(cd "$1" && pwd) || exit 2
LIMIT=${2:-580} PARTS=" ${*:3} "
VRAMLAB=$(realpath "${VRAMLAB:-target/release/vramlab}") PYTHON=${PYTHON:-python3}
WORK=$(mktemp -d) RECORD=$OUT/any-program.txt TIMES=$OUT/times.tsv
trap 'rm -rf "$WORK"' EXIT
export VRAMLAB PYTHON WORK OUT TIMES TURN=$WORK/turn VRAMLAB_NO_COLOR=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
export PATH=$PATH:/usr/local/cuda/bin LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/cuda/lib64
[ -x "$VRAMLAB" ] || { echo "$VRAMLAB: not there; build it with cargo build --release -p vramlab-cli -p vramlab-inject, or set VRAMLAB"; exit 2; }
command -v nvcc > /dev/null || { echo "nvcc: not found; install CUDA's toolkit or add it to PATH"; exit 2; }

left() { echo $((LIMIT - $(date +%s) + START)); }
has_part() { [ "$PARTS" = "  " ] || [[ $PARTS == *" $1 "* ]]; }
has_module() { "$PYTHON" -c "import $1" 2> /dev/null; }
# summarize PROGRAM...: appends their rows to the record.
summarize() { "$PYTHON" "$HERE/summary.py" "$TIMES" "$@" | tee -a "$RECORD"; }

# check LABEL SECONDS COMMAND...: a program's exit code and last line.
check() {
  local label=$1 limit=$2; shift 2; local file; file=$OUT/$(echo "$label" | tr '/ ' '-_')
  timeout "$limit" "$@" > "$file.out" 2> "$file.err"
  echo "$label exit code $? $(tail -1 "$file.out" | cut -c1-150)" >> "$OUT/checks.txt"
}
# check_ways LABEL SECONDS COMMAND...: without the library, recorded, and served.
check_ways() {
  local label=$1 limit=$2; shift 2
  check "$label/plain" "$limit" "$@"
  check "$label/record" "$limit" "$VRAMLAB" run --no-advise -o "$WORK/$label-record" -- "$@"
  check "$label/caching" "$limit" "$VRAMLAB" run --no-advise --alloc caching -o "$WORK/$label-caching" -- "$@"
}
# vramlab_run [OPTION...]: the beginning of a measured command.
vramlab_run() { echo "$VRAMLAB run --quiet --no-advise -o $WORK/timed $*"; }
# timed LABEL COMMAND...: the time that a program prints.
timed() {
  local label=$1; shift
  printf '%s\t%s\n' "$label" "$(timeout 60 "$@" 2> /dev/null | grep -E "us a step|ns a launch" | tail -1)" >> "$TIMES"
}
# timed_ways NAME COMMAND...: unchanged, recorded, and the three ways to free, once each.
timed_ways() {
  local name=$1; shift
  timed "$name/plain" "$@"
  timed "$name/record" $(vramlab_run --stacks off) -- "$@"
  for way in driver waits ordered; do timed "$name/$way" $(vramlab_run --stacks off --alloc caching --free $way) -- "$@"; done
}

[ -f "$RECORD" ] || cat > "$RECORD" <<TEXT
What an unchanged CUDA program costs under \`vramlab run\`.

machine  $(nvidia-smi --query-gpu=name --format=csv,noheader | head -1), driver $(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1), CUDA $(nvcc --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p'), $(nproc) cores, $(date +%F)
build    ${BUILD:-$(git -C "$HERE" rev-parse --short HEAD 2> /dev/null || echo unknown)}
command  experiments/cuda/measure.sh; vramlab run --stacks off [--alloc caching --free driver|waits|ordered] -- PROGRAM
values   us a step (launches: ns a launch) that the program prints; plain: without vramlab; record: recorded, the driver's memory;
         stacks: recorded with call stacks; interleaved runs, n of each
programs matrices: static cudart; shared: shared cudart; per-thread: per-thread default streams; two: two non-blocking streams;
         four: four blocking streams; resnet50, gpt2: training steps of experiments/pytorch/programs, small ones with batch=32 and with batch=4 length=512;
         cuda_mlp: github.com/Lawrencium77/cuda_mlp, ordered and plain with ALLOCATOR_TYPE=cuda; cuda-mnist: github.com/andylolu2/cuda-mnist

TEXT
cd "$WORK" || exit 1
build() { nvcc -arch=native -O2 -g -o "$1" "$HERE/$2.cu" "${@:3}" 2> "$1.log" || { echo "$2.cu:"; tail -3 "$1.log"; } >> "$OUT/nvcc.txt"; }
build matrices matrices & build shared matrices -cudart shared & build per-thread matrices --default-stream per-thread &
for name in managed texture launches mixed_calls graph algorithms; do build $name $name & done
build libraries libraries -lcublas -lcufft -lcusolver &
wait
echo "compiled after $(( $(date +%s) - START )) s"

if has_part check; then
  : > "$OUT/checks.txt"
  if has_module jax; then
    for kind in default platform cuda_async; do
      ( [ $kind = default ] || export XLA_PYTHON_CLIENT_ALLOCATOR=$kind; check_ways jax-$kind 70 "$PYTHON" "$HERE/jax_step.py" ) &
    done
  fi
  has_module rmm && check_ways rmm 60 "$PYTHON" "$HERE/rmm_loop.py" driver &
  check_ways thrust 40 ./algorithms & check_ways graph 40 ./graph &
  for name in blas fft solver; do check_ways $name 40 ./libraries $name & done
  wait
  for name in matrices shared per-thread; do check_ways $name 40 ./$name 300 512 0 check & done
  for count in 2 -4; do check_ways "streams$count" 40 ./matrices 300 512 $count check & done
  wait
  for name in naive pytorch stream-ordered bfc tlsf rmm-pool; do
    check "two-streams/$name" 40 "$VRAMLAB" run --no-advise --alloc $name -o "$WORK/two-$name" -- ./matrices 300 512 2 check &
  done
  check poison 40 "$VRAMLAB" run --no-advise --alloc caching --poison -o "$WORK/poison" -- ./matrices 300 512 0 check &
  check mixed/plain 60 ./mixed_calls 2000 & check mixed/record 60 "$VRAMLAB" run --no-advise -o "$WORK/mixed" -- ./mixed_calls 2000 &
  check mixed/caching 150 "$VRAMLAB" run --no-advise --stacks off --alloc caching -o "$WORK/mixed-caching" -- ./mixed_calls 210000 &
  command -v compute-sanitizer > /dev/null && check sanitizer 60 "$VRAMLAB" run --no-advise --alloc caching -o "$WORK/sanitizer" -- compute-sanitizer ./matrices 5 512 &
  wait
  { echo "checks (exit code 0 and equal last lines, but for times, are wanted):"; sort "$OUT/checks.txt"; echo; } >> "$RECORD"
  check last-lines 40 "$VRAMLAB" run -o "$OUT/last-lines" -- ./matrices 2000 512
  { echo "the last lines of vramlab run -- ./matrices 2000 512:"; cat "$OUT/last-lines.err"; echo; } >> "$RECORD"
  echo "checks done, $(left) s left"
fi

# python_run LABEL KIND PROGRAM...: as `timed`, in a process of its own, so that others import meanwhile (turn.py).
cat > python_run.sh <<'SH'
label=$1 kind=$2; shift 2
folder=$(mktemp -d "$WORK/python-XXXX") command=("$@")
run=("$VRAMLAB" run --quiet --no-advise --stacks off --at-driver -o "$folder/run")
case $kind in
  plain) ;;
  record) command=("${run[@]}" -- "$@") ;;
  *) command=("${run[@]}" --alloc caching --free "$kind" -- "$@") ;;
esac
line=$(timeout 100 "${command[@]}" 2> "$folder/err" | grep "us a step" | tail -1)
printf '%s\t%s\n' "$label" "$line" >> "$TIMES"
[ -n "$line" ] || { echo "$label:"; tail -3 "$folder/err"; } >> "$OUT/python-errors.txt"
rm -rf "$folder"
SH
# python_runs SECONDS FILE: the runs that FILE lists.
python_runs() { [ "$1" -gt 5 ] && timeout "$1" xargs -a "$2" -L 1 -P 5 bash python_run.sh; }
STEP="$PYTHON $HERE/torch_step.py" NO_CACHE="env PYTORCH_NO_CUDA_MEMORY_CACHING=1"
if has_part torch && has_module torch; then
  # In one process, own cache and served memory in turn: the host's speed varies more from run to run than the two differ.
  while read -r name program; do
    line=$(timeout 120 $(vramlab_run --stacks off --at-driver --alloc caching) -- $STEP $program 2> /dev/null < /dev/null | grep ratio)
    echo "in turn: $name: ${line:-no result}" | tee -a "$RECORD"
  done <<'LIST'
resnet50 resnet50 both 6
resnet50-small resnet50 both 10 batch=32
gpt2 gpt2 both 6
gpt2-small gpt2 both 10 batch=4 length=512
LIST
fi
if has_part python; then
  for run in $(seq 11); do
    has_module cupy && for kind in "plain plain" "own-pool plain" "ordered ordered"; do
      [ "$kind" = "own-pool plain" ] && pool=pool || pool=driver
      echo "cupy/$kind $PYTHON $HERE/cupy_loop.py $pool"
    done
    has_module rmm && for kind in "plain plain" "own-pool plain" "ordered ordered"; do
      [ "$kind" = "own-pool plain" ] && pool=pool || pool=driver
      echo "rmm/$kind $PYTHON $HERE/rmm_loop.py $pool"
    done
  done > loops
  has_module torch && for run in $(seq 10); do
    for name in resnet50 gpt2; do
      echo "$name/own-cache plain $STEP $name own 20"
      echo "$name/ordered ordered $NO_CACHE $STEP $name driver 20"
      echo "$name/record record $STEP $name own 20"
      [ "$run" -le 3 ] && echo "$name/no-cache plain $NO_CACHE $STEP $name driver 8" && echo "$name/waits waits $NO_CACHE $STEP $name driver 12"
    done
  done > steps
  python_runs $(( $(left) * 25 / 100 )) loops
  summarize cupy rmm
  python_runs $(( $(left) * 60 / 100 )) steps
  summarize resnet50 gpt2
fi

if has_part programs && [ -n "$MNIST" ]; then
  for file in train-images-idx3-ubyte train-labels-idx1-ubyte t10k-images-idx3-ubyte t10k-labels-idx1-ubyte; do gunzip -kc "$MNIST/$file.gz" > $file; done
  printf '%s\n' data_dir=. num_layers=4 feat_dim=784 log_dir=./log num_epochs=2 bsz=64 learning_rate=0.1 verbose=0 time_epoch=1 > mlp.txt
  # mlp LABEL COMMAND...: an epoch has 938 steps, and its validation.
  mlp() {
    local label=$1 ms; shift; ms=$(timeout 60 "$@" 2> /dev/null | sed -n 's/.* took \([0-9]*\) ms/\1/p' | tail -1)
    printf '%s\t%s us a step\n' "$label" "$(awk "BEGIN { print ${ms:-0} * 1000 / 938 }")" >> "$TIMES"
  }
  # mnist LABEL COMMAND...: 10,000 steps.
  mnist() {
    local label=$1 out; shift; out=$(timeout 60 "$@" 2> /dev/null)
    printf '%s\t%s us a step, loss %s\n' "$label" "$(echo "$out" | sed -n 's/Duration: \(.*\)s/\1/p' | awk '{ print $1 * 100 }')" \
      "$(echo "$out" | grep -o 'loss: .*' | tail -1 | cut -c7-)" >> "$TIMES"
  }
  SERVED="$(vramlab_run --stacks off --alloc caching) --"
  for run in $(seq 10); do
    [ "$(left)" -lt 30 ] && break
    if [ -n "$CUDA_MLP" ]; then
      mlp cuda_mlp/own-pool "$CUDA_MLP" mlp.txt; mlp cuda_mlp/own-pool-served $SERVED "$CUDA_MLP" mlp.txt
      mlp cuda_mlp/plain env ALLOCATOR_TYPE=cuda "$CUDA_MLP" mlp.txt; mlp cuda_mlp/ordered env ALLOCATOR_TYPE=cuda $SERVED "$CUDA_MLP" mlp.txt
    fi
    if [ -n "$CUDA_MNIST" ]; then
      mnist cuda-mnist/plain "$CUDA_MNIST" . 10000 128; mnist cuda-mnist/ordered $SERVED "$CUDA_MNIST" . 10000 128
    fi
  done
  summarize cuda_mlp cuda-mnist
fi

if has_part raw; then
  run=0
  while [ $run -lt 11 ] && [ "$(left)" -gt 12 ]; do
    run=$((run + 1))
    timed_ways matrices ./matrices 1000 512
    timed matrices/stacks $(vramlab_run) -- ./matrices 1000 512
    timed_ways two ./matrices 1000 512 2
    for name in shared per-thread; do
      timed $name/plain ./$name 1000 512; timed $name/ordered $(vramlab_run --stacks off --alloc caching) -- ./$name 1000 512
    done
    timed four/plain ./matrices 1000 512 -4; timed four/ordered $(vramlab_run --stacks off --alloc caching) -- ./matrices 1000 512 -4
    for name in managed texture; do
      timed_ways $name ./$name
    done
    timed launches/plain ./launches
    timed launches/record $(vramlab_run --stacks off) -- ./launches
    timed launches/ordered $(vramlab_run --stacks off --alloc caching) -- ./launches
  done
  summarize matrices two shared per-thread four managed texture launches
fi
echo "took $(( $(date +%s) - START )) s"
