"""How long the workshop takes for 1,000 miners over 30 days, and whether every attack earns less than honesty under the default.

One world in this process, so on one core; seconds by the processor's clock and by the wall's. The last line is JSON.

    python -m benchmarks.incentives            # 1,000 machines, 30 days, three seeds for the verdict, the first one timed
    python -m benchmarks.incentives --quick    # 100 machines, 3 days, two seeds: too few for the verdict to count
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time

from iota.incentives import run_jobs, scenario_named
from iota.incentives_tables import print_result, verdict
from iota.incentives_worker import run_job
from subnet.incentives.scenario import scaled
from subnet.incentives.summary import result_of
from subnet.policy.policy import SubnetPolicy

LIMIT_S = 60.0
"""Of one world of 1,000 machines and 30 days, on one core."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="100 machines, 3 days")
    parser.add_argument("--seeds", type=int, default=0, help="worlds for the verdict, 3 (quick: 2) without it")
    options = parser.parse_args(arguments)
    miners, days, num_seeds = (100, 3.0, 2) if options.quick else (1000, 30.0, 3)
    num_seeds = options.seeds or num_seeds
    policy, scenario = SubnetPolicy(), scaled(scenario_named("standard"), miners=miners, days=days)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    first = run_job((policy, scenario, 1))
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    others = run_jobs([(policy, scenario, seed) for seed in range(2, num_seeds + 1)], processes=2)
    result = result_of(policy, scenario, [first, *others])
    print_result(result)
    gains = {k.name: round(k.gain.mean, 3) for k in result.kinds if k.is_attack and k.gain is not None}
    figures = {
        "machines": miners,
        "days": days,
        "tempos": result.tempos,
        "seeds": num_seeds,
        "cpu_s": round(cpu_s, 1),
        "wall_s": round(wall_s, 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "machine_tempos_per_cpu_s": round(miners * result.tempos / cpu_s),
        "gain_over_honesty_usd_per_day": gains,
        "verdict": verdict(result),
    }
    limits = {"cpu_s": LIMIT_S, "gain_over_honesty_usd_per_day": 0.0}
    ok = cpu_s <= LIMIT_S and (options.quick or all(gain < 0 for gain in gains.values()))
    print(json.dumps({"name": "incentives", "figures": figures, "limits": limits, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
