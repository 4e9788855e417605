r"""Does the analysis tell the truth? Many simulated experiments in the calendar shop, against the known true effect.

    OFF="--no-replenishment --no-weekly --no-daily --no-lifetimes --no-sessions"
    trope generate --out season.parquet --users 6000 --items 1000 --years 4 --mean-events 30 $OFF
    trope generate --out none.parquet --users 20000 --items 1000 --years 4 --mean-events 20 $OFF --no-yearly
    SIZES="--set model.width=64 --set model.blocks=2 --set model.heads=2 --set model.head_dim=32 --set model.max_len=20"
    for SHOP in season none; do
        trope prepare $SHOP.parquet --out data-$SHOP
        for MODEL in hstu-time trope; do
            trope train data-$SHOP --model $MODEL --out run-$SHOP-$MODEL $SIZES --set train.eval_every=4 \
                --set train.epochs=$([ $SHOP = season ] && echo 12 || echo 16)
        done
        python benchmarks/rehearsal.py $SHOP $SHOP.truth.json run-$SHOP-hstu-time run-$SHOP-trope --work work \
            --users $([ $SHOP = season ] && echo 3000 || echo 4000)
    done

A training takes one to five minutes on a busy machine with two cores, an experiment about two seconds of CPU time.
The shop without seasons is larger, so that both models learn all there is: with 6,000 users and 12 epochs `trope` has a
better HR@10 (0.174 against 0.147) although nothing is temporal.
Each shop is an entry of results/rehearsal.json. What is done is kept in --work, so that a run can be stopped.
The interval of an experiment is that of `trope abtest analyse`; so is its verdict.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from trope.data.sources.resolve import Request
from trope.environment import describe
from trope.online.analysis.analyse import Question, analyse
from trope.online.analysis.verdict import judge
from trope.online.simulation.answers import InProcess, open_arms
from trope.online.simulation.population import Population, read_shop
from trope.online.simulation.record import EXPOSURES, OUTCOMES
from trope.online.simulation.rehearsal import rehearse
from trope.online.simulation.truth import METRICS, Effect, holds, share, true_effects
from trope.runs import read_metrics, write_json

QUESTION = Question(metrics=",".join(METRICS))
RESULTS = Path(__file__).parent.parent / "results" / "rehearsal.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the entry in the results: season or none")
    parser.add_argument("shop", type=Path, help="NAME.truth.json")
    parser.add_argument("control", type=Path)
    parser.add_argument("treatment", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="what is done is kept here")
    parser.add_argument("--experiments", type=int, default=200)
    parser.add_argument("--repetitions", type=int, default=60, help="for the true effect")
    parser.add_argument("--users", type=int, default=4_000)
    parser.add_argument("--days", type=int, default=60)
    parser.add_argument("-k", type=int, default=10)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    work = asked.work / asked.name
    work.mkdir(parents=True, exist_ok=True)
    population = Population.of(read_shop(asked.shop), asked.users)
    arms = open_arms({"control": str(asked.control), "treatment": str(asked.treatment)}, population.shop.items, asked.k)
    truth = find_truth(population, arms, asked, work / "truth.json")
    records = play(population, arms, asked, work)
    entry = {
        **summarise(truth, records),
        "experiments": len(records), "repetitions": asked.repetitions, "users": asked.users, "days": asked.days,
        "k": asked.k, "shop": vars(population.shop), "seconds_an_experiment": median([r["seconds"] for r in records]),
        "arms": {arm: about(run) for arm, run in (("control", asked.control), ("treatment", asked.treatment))},
        "environment": describe(),
    }  # fmt: skip
    entries = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    write_json(RESULTS, {**entries, asked.name: entry})
    print(json.dumps({name: entry[name] for name in ("metrics", "winner", "difference", "refused")}, indent=2))


def find_truth(
    population: Population, arms: dict[str, InProcess], asked: argparse.Namespace, path: Path
) -> dict[str, Effect]:
    if not path.is_file():
        control, treatment = arms.values()
        found = true_effects(population, asked.days, control, treatment, asked.repetitions, say("repetition"))
        write_json(path, {name: effect._asdict() for name, effect in found.items()})
    return {name: Effect(**told) for name, told in json.loads(path.read_text(encoding="utf-8")).items()}


def play(
    population: Population, arms: dict[str, InProcess], asked: argparse.Namespace, work: Path
) -> list[dict[str, Any]]:
    """A record for each experiment; those of an earlier call are read."""
    path = work / "experiments.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    for seed in range(len(records), asked.experiments):
        folder, begin = work / "one", time.perf_counter()
        played = rehearse(population, asked.days, arms, seed, folder)
        simulated = time.perf_counter() - begin
        analysis = analyse(folder / EXPOSURES, Request(str(folder / OUTCOMES)), QUESTION, threads=1, work=folder)
        verdict = judge(analysis)
        record = {
            "seed": seed, "visits": len(played.traffic), "users": sum(analysis.users.values()), "seconds": simulated,
            "winner": bool(verdict.winners), "refused": bool(verdict.refused),
            "difference": any(each.adjusted < analysis.question.alpha for each in analysis.comparisons),
            "metrics": {
                name: {"lift": of.estimate.lift, "low": of.low, "high": of.high, "p": of.p}
                for name in METRICS
                if (of := analysis.of(name).reading)
            },
        }  # fmt: skip
        shutil.rmtree(folder)
        records.append(record)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        say("experiment")(seed + 1)
    return records[: asked.experiments]


def summarise(truth: dict[str, Effect], records: list[dict[str, Any]]) -> dict[str, Any]:
    metrics = {}
    for name, effect in truth.items():
        found = [record["metrics"][name] for record in records]
        # Distance to the truth in standard errors: its spread is 1 where the intervals are as wide as they should be.
        far = [distance(each["lift"], each["low"], each["high"], effect.lift) for each in found]
        covered = share(holds(each["low"], each["high"], effect) for each in found)
        metrics[name] = {
            "true_lift": effect.lift, "true_lift_error": effect.error,
            "mean_estimate": sum(each["lift"] for each in found) / len(found),
            "interval_holds_truth": covered, "error": math.sqrt(covered * (1 - covered) / len(found)),
            "median_interval": [median([each[side] for each in found]) for side in ("low", "high")],
            "distance_mean": statistics.fmean(far), "distance_spread": statistics.stdev(far),
            "p_below_alpha": share(each["p"] < 0.05 for each in found),
        }  # fmt: skip
    return {
        "metrics": metrics,
        "winner": share(record["winner"] for record in records),
        "difference": share(record["difference"] for record in records),
        "refused": share(record["refused"] for record in records),
    }


def distance(lift: float, low: float, high: float, true: float) -> float:
    """By how many standard errors an estimate misses the truth, on the scale of logarithms, as intervals are."""
    error = (math.log1p(high) - math.log1p(low)) / (2 * statistics.NormalDist().inv_cdf(0.975))
    return (math.log1p(lift) - math.log1p(true)) / error


def about(run: Path) -> dict[str, Any]:
    metrics = read_metrics(run)
    return {"run": run.name, "best_epoch": metrics["best_epoch"], "test_HR@10": metrics["test"]["HR@10"]}


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def say(what: str) -> Any:
    return lambda number: (
        print(f"{time.strftime('%H:%M:%S')} {what} {number}", flush=True) if number % 10 == 0 else None
    )


if __name__ == "__main__":
    main()
