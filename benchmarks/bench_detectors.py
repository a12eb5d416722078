"""What the detectors cost, as ratios to one River ADWIN per series in the same run, and how often noise is confirmed.

    python benchmarks/bench_detectors.py                          cost per frame, rates, bytes per series
    python benchmarks/bench_detectors.py --false-confirmations 10000   sequential verification of pure noise

Times are CPU time of this process, the best of several frames, so that a busy machine disturbs little.
"""

import argparse
import pickle
import time
from collections.abc import Callable, Iterable

import numpy as np

from detectors.adwin import Adwin
from detectors.bocpd import Bocpd
from detectors.cusum import Cusum
from detectors.detector import Detector, FloatArray
from detectors.page_hinkley import PageHinkley
from detectors.peer import Peer
from detectors.period import anchor, period
from detectors.verify import MOST_AFTER, Outcome, confirm, shift

SIZES = 64, 1024, 10_240
WARM_FRAMES, TIMED_FRAMES = 37, 31
BASELINE = "adwin"
MEMBERS: dict[str, Callable[[int], Detector]] = {
    "adwin": Adwin,
    "page_hinkley": PageHinkley,
    "bocpd": Bocpd,
    "cusum": Cusum,
    "peer": lambda n: Peer(np.arange(n) // 16),
}


def best_s(action: Callable[[FloatArray], object], arguments: Iterable[FloatArray]) -> float:
    """Return the least CPU time that the action took."""
    taken = []
    for argument in arguments:
        start = time.process_time()
        action(argument)
        taken.append(time.process_time() - start)
    return min(taken)


def cost(make: Callable[[int], Detector], n_series: int) -> tuple[float, float]:
    """Return CPU seconds per frame, and bytes of state per series, after the warm-up."""
    frames = np.random.default_rng(n_series).normal(0.0, 0.02, (WARM_FRAMES + TIMED_FRAMES, n_series))
    detector = make(n_series)
    for frame in frames[:WARM_FRAMES]:
        detector.update(frame)
    frame_s = best_s(detector.update, frames[WARM_FRAMES:])
    return frame_s, len(pickle.dumps(vars(detector))) / n_series


def print_costs() -> None:
    """Print cost and size of each detector at each size of job."""
    print(
        f"{'detector':14}{'series':>8}{'ms/frame':>11}{'M updates/s':>13}{'speed, ADWIN = 1':>18}{'bytes/series':>14}"
    )
    for n_series in SIZES:
        baseline_s, baseline_size = cost(MEMBERS[BASELINE], n_series)
        for name, make in MEMBERS.items():
            frame_s, size = (baseline_s, baseline_size) if name == BASELINE else cost(make, n_series)
            rate = n_series / frame_s / 1e6
            print(f"{name:14}{n_series:8}{frame_s * 1e3:11.2f}{rate:13.2f}{baseline_s / frame_s:18.2f}{size:14.0f}")


def print_functions() -> None:
    """Print the cost of what is called once per suspicion or re-learning and not once per frame."""
    rng = np.random.default_rng(1)
    times = np.exp(rng.normal(0.0, 0.02, 230))
    periodic = np.tile([*([1.0, 2.0, 3.0, 4.0] * 11), 5.0], 89)
    actions: dict[str, Callable[[FloatArray], object]] = {
        "verify.shift, 200 before and 30 after": lambda _: shift(times[:200], times[200:]),
        "period and anchor, 4,005 tokens": lambda _: find_iterations(periodic),
        "period, 4,000 tokens without one": find_iterations,
    }
    for name, action in actions.items():
        duration_s = best_s(action, rng.integers(0, 9, (31, 4000)).astype(np.float64))
        print(f"{name:40}{duration_s * 1e3:8.2f} ms")


def find_iterations(tokens: FloatArray) -> object:
    """Return the anchor of a sequence of tokens, None without a period."""
    codes = tokens.astype(np.int64)
    found = period(codes)
    return None if found is None else anchor(codes, found)


def false_confirmations(cv: float, n_before: int, spikes: float, tries: int) -> int:
    """Return how many of so many healthy jobs, looked at after each of 2 to 30 iterations, were found slower by 5 %."""
    rng = np.random.default_rng(int(1e6 * cv) + n_before)
    sigma = float(np.sqrt(np.log1p(cv**2)))
    confirmed = 0
    for _ in range(tries):
        job = np.exp(rng.normal(0.0, sigma, n_before + MOST_AFTER))
        job[rng.random(len(job)) < spikes] *= rng.uniform(1.5, 5.0)
        for n_after in range(2, MOST_AFTER + 1):
            outcome = confirm(shift(job[:n_before], job[n_before : n_before + n_after])).outcome
            if outcome is not Outcome.UNDECIDED:
                confirmed += outcome is Outcome.CONFIRMED
                break
    return confirmed


def print_false_confirmations(tries: int) -> None:
    """Print how often noise confirms, by jitter, length of the reference and frequency of spikes."""
    print(f"{'jitter CV':>10}{'before':>8}{'spikes':>8}{'confirmed':>11}{'tries':>8}")
    for spikes in (0.0, 0.01, 0.05):
        for cv in (0.005, 0.023, 0.07, 0.11):
            for n_before in (30, 100):
                found = false_confirmations(cv, n_before, spikes, tries)
                print(f"{cv:10.3f}{n_before:8}{spikes:8.2f}{found:11}{tries:8}", flush=True)


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--false-confirmations", type=int, metavar="TRIES", help="simulated healthy jobs per setting")
    tries = parser.parse_args().false_confirmations
    if tries:
        print_false_confirmations(tries)
    else:
        print_costs()
        print_functions()


if __name__ == "__main__":
    main()
