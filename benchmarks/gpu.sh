#!/usr/bin/env bash
# What only a GPU can show, from a bare checkout, in parts that fit into ten minutes on an H200:
#
#   bash benchmarks/gpu.sh tests OUT            pytest -m gpu, twelve jobs at a time, and 200 steps of every model
#   bash benchmarks/gpu.sh serve OUT            many moments of one user, answers a second
#   bash benchmarks/gpu.sh warm OUT             compiles what `speed` and `speed-large` need, all at once; times nothing
#   bash benchmarks/gpu.sh speed OUT            steps a second of all models at the paper's shapes: the small ones
#   bash benchmarks/gpu.sh speed-large OUT      the same: the shop, long histories, large catalogues
#   bash benchmarks/gpu.sh speed-parts OUT      a step by kernel, attention, the rotary kernels, evaluation
#   bash benchmarks/gpu.sh accuracy OUT DATA    the recommended model on a prepared dataset, one seed
#   bash benchmarks/gpu.sh replay OUT DATA      the test window of DATA hour by hour, retrained every hour
#
# OUT gets the logs and CSV files. A part that is cut off leaves what it has measured so far; results/ takes whole parts
# of one commit.
set -euo pipefail
cd "$(dirname "$0")/.."
part=${1:?tests, serve, warm, speed, speed-large, speed-parts, accuracy or replay} out=${2:?a folder for what is measured}
mkdir -p "$out"
export PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
unset TRITON_INTERPRET # for tests on a CPU

three=(--model hstu-time --model hstu-trope-attention --model hstu-trope)

steps() { # name, arguments of trope bench train
  "$python" -m trope bench train --csv "$out/$1.csv" "${@:2}" 2>&1 | tee "$out/$1.log"
}

case $part in
  tests)
    # The longest file is three jobs, and goes first. Exit code 5: the job has no test for a GPU.
    export OMP_NUM_THREADS=2 # several jobs share the cores
    export TROPE_PARITY="$out/parity-h200.csv"
    {
      printf '%s\n' 'test_train_fused -k two_hundred_steps_agree' 'test_train_fused -k two_hundred_steps_with' \
        'test_train_fused -k not(two_hundred)' test_kernels_causal_attention test_kernels
      grep -lE 'on_gpu|mark\.gpu|device: str' tests/test_*.py | xargs -n 1 basename -s .py |
        grep -vxE 'test_train_fused|test_kernels_causal_attention|test_kernels'
    } | xargs -P 12 -I {} sh -c '
      set -- "$1" $2; out="$1"; file="tests/$2.py"; shift 2
      log="$out/$(basename "$file" .py)${2:+-$2}.log"
      "$0" -m pytest -m gpu "$file" "$@" > "$log" 2>&1; code=$?
      echo "exit code $code: $file $*: $(tail -1 "$log")"; grep -E "^(FAILED|ERROR|E  )" "$log"
      [ $code = 5 ] || exit $code' "$python" "$out" {}
    ;;
  serve)
    PYTHONPATH=. "$python" benchmarks/look.py --device cuda --length 1024 | tee "$out/look-h200.txt"
    PYTHONPATH=. "$python" benchmarks/answers.py --device cuda --out "$out/answers-h200.json"
    ;;
  warm)
    compile() { "$python" -m trope bench train --quick "$@" > /dev/null & }
    for shape in pixel1m ml20m; do
      compile --shape $shape --model hstu --model hstu-time --lengths full
      compile --shape $shape --model hstu-torope --lengths full
      compile --shape $shape --model hstu-trope-attention --model hstu-trope
      compile --shape $shape --model transformer --model transformer-trope --lengths full
    done
    compile --shape shop --model hstu-time --model hstu-trope-attention --model hstu-trope
    for shape in pixel200k pixel8m books shop-long; do compile --shape $shape --model hstu-trope --lengths full; done
    wait
    ;;
  speed)
    steps train-small --shape pixel1m --shape ml20m --lengths full --model hstu --model hstu-time --model hstu-torope \
      --model hstu-trope-attention --model hstu-trope --model transformer --model transformer-trope
    steps train-own --shape pixel1m --shape ml20m --lengths own "${three[@]}"
    steps train-eager --shape pixel1m --shape ml20m --model hstu-trope --version eager --lengths full
    ;;
  speed-large)
    steps train-shop --shape shop "${three[@]}"
    steps train-large --shape pixel200k --shape pixel8m --shape books --shape shop-long --model hstu-trope --lengths full
    steps train-largest --shape shop-100m --model hstu-trope --lengths full --steps 40
    ;;
  speed-parts)
    PYTHONPATH=. "$python" benchmarks/profile_step.py pixel1m:hstu-trope pixel1m:transformer-trope shop:hstu-trope \
      shop-long:hstu-trope > "$out/profile-h200.txt" 2> "$out/profile.log"
    PYTHONPATH=. "$python" benchmarks/profile_step.py --timeline pixel1m:hstu-trope > "$out/timeline-h200.txt" 2>> "$out/profile.log"
    PYTHONPATH=. "$python" benchmarks/attention_parts.py --only new > "$out/attention-parts.txt" 2> "$out/attention.log"
    "$python" -m trope bench kernels --csv "$out/kernels-h200.csv"
    "$python" -m trope bench eval --csv "$out/eval-h200.csv"
    ;;
  accuracy)
    "$python" -m trope train "${3:?a prepared dataset}" --out "$out/run" --no-progress 2>&1 | tee "$out/train.log"
    "$python" -m trope evaluate "$out/run" 2>&1 | tee "$out/evaluate.log"
    ;;
  replay)
    "$python" -m trope replay "${3:?a dataset of trope prepare --protocol holdout}" --every 1h --out "$out/replay"
    ;;
  *) echo "no part $part" >&2; exit 2 ;;
esac
