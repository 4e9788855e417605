set -o pipefail
export PYTHONUNBUFFERED=1 PYTHONPATH=.
t0=$SECONDS
timeout 50 python3 benchmarks/try_narrow.py 2>&1 | grep -v Warn | tee $OUT/parts.txt; echo "parts: $((SECONDS-t0)) s"
timeout 70 python3 benchmarks/step_variants.py --shape pixel1m --turns 2 2>&1 | tee $OUT/pixel1m.txt | tail -9; echo "pixel1m: $((SECONDS-t0)) s"
