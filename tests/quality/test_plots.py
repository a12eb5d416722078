"""The page of plots is drawn from scores and findings."""

from pathlib import Path

import pytest

from benchmarks.quality.real_curves import Curve
from benchmarks.quality.score import headline
from tests.quality.test_matching import answer, matched, opening


def test_a_page_is_drawn_with_and_without_curves_of_real_series(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.quality.plots import draw_page

    episodes = [matched([answer(shift_sigmas=sigmas)], opening()) for sigmas in (1.0, 4.0, 20.0)]
    curve = Curve(
        shape="step",
        noise="own",
        shift_sigmas=3.0,
        ratio=1.2,
        n=4,
        recall=1.0,
        recall_interval=(0.5, 1.0),
        delay=3.0,
        delay_interval=(2.0, 4.0),
        bound=2.0,
        extra_per_10000=0.0,
    )
    for number, curves in enumerate(([], [curve])):
        path = tmp_path / f"{number}.png"
        draw_page(path, "development", headline(episodes), episodes, curves)
        assert path.read_bytes().startswith(b"\x89PNG")
