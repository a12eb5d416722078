"""Samples of hosts are of intervals: they describe the iterations before them."""

import numpy as np

from schemas.iterations import IterationRows
from tests.pipeline.window_streams import MS, T0, Trainer, answers, batch, host_samples


def run(n_iterations: int, *samples: tuple[int, float]) -> IterationRows:
    trainer = Trainer()
    for _ in range(n_iterations):
        trainer.iterate()
    told = trainer.tables() | {"flush_ns": trainer.now_ns + 1, "is_last": True, "host_samples": host_samples(*samples)}
    return answers([batch(0, **told)]).rows


def test_a_hosts_sample_describes_the_iterations_of_the_interval_that_it_ends() -> None:
    taken = ((T0 + 150 * MS, 0.125), (T0 + 450 * MS, 0.5), (T0 + 600 * MS, 0.75))
    rows = run(9, *taken)
    ends_with_its_sample = 0.75
    np.testing.assert_allclose(
        rows.run_queue_ratio,
        [0.125, (0.125 + 0.5) / 2, 0.5, 0.5, (0.5 + 0.75) / 2, ends_with_its_sample, 0.75, 0.75, 0.75],
    )


def test_a_hosts_sample_says_nothing_of_what_was_long_before() -> None:
    rows = run(40, (T0 + 3_650 * MS, 0.5))
    assert np.isnan(rows.run_queue_ratio[:11]).all()
    assert (rows.run_queue_ratio[12:] == 0.5).all()
