set -o pipefail
export PYTHONUNBUFFERED=1 PYTHONPATH=.
t0=$SECONDS
timeout 70 python3 benchmarks/try_narrow.py 2>&1 | tee $OUT/parts.txt; echo "parts: $((SECONDS-t0)) s"
timeout 70 python3 benchmarks/step_variants.py --shape pixel1m --turns 2 2>&1 | tee $OUT/pixel1m.txt | tail -9; echo "pixel1m: $((SECONDS-t0)) s"
timeout 40 python3 benchmarks/profile_step.py --timeline pixel1m:hstu-trope > $OUT/timeline.txt 2>$OUT/err.txt
S="--section SpeedOfLight --section WarpStateStats --section SchedulerStats --section MemoryWorkloadAnalysis --section ComputeWorkloadAnalysis --section Occupancy --section InstructionStats"
timeout 60 ncu --clock-control none $S -k regex:narrow_ --launch-skip 4 --launch-count 4 python3 benchmarks/try_ncu.py > $OUT/ncu.txt 2>&1; echo "ncu $?: $((SECONDS-t0)) s"
timeout 60 ncu --clock-control none $S -k regex:update_others --launch-skip 1 --launch-count 1 python3 benchmarks/try_own.py > $OUT/ncu_own.txt 2>&1; echo "all $?: $((SECONDS-t0)) s"
