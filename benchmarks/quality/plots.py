"""One page of plots beside the table."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.quality.matching import Finding, Matched
from benchmarks.quality.real_curves import Curve
from benchmarks.quality.score import CLEAR_SIGMAS, Headline, delay, is_prompt
from schemas.table import FloatArray

_FALSE_EVERY = 10_000
_BINS = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.3, 5.0, 8.0, 13.0, 30.0, 1000.0)


def draw_page(path: Path, title: str, scores: Headline, matched: Sequence[Matched], curves: Sequence[Curve]) -> None:
    """Write a page of six plots; its ending says in which format."""
    figure = Figure(figsize=(15, 19), layout="constrained")
    axes = figure.subplots(3, 2)
    figure.suptitle(f"{title}: {scores.episodes} episodes")
    _shares(axes[0][0], scores)
    _false(axes[0][1], scores)
    _corpus_recall(axes[1][0], matched)
    _corpus_delay(axes[1][1], matched)
    _real(axes[2][0], curves, "recall")
    _real(axes[2][1], curves, "delay")
    figure.savefig(path, dpi=110)


def _shares(axis: Any, scores: Headline) -> None:
    names = [name for name, one in scores.classes.items() if one.recall.n]
    rows = np.arange(len(names))
    kinds = (("recall", "recall"), ("precision", "precision"), ("component_first", "component first"))
    for number, (field, label) in enumerate(kinds):
        shares = [getattr(scores.classes[name], field) for name in names]
        value = np.array([share.value for share in shares])
        low, high = np.array([share.interval for share in shares]).reshape(-1, 2).T
        axis.errorbar(
            value,
            rows + 0.2 * (number - 1),
            xerr=np.array([value - low, high - value]).clip(0),
            fmt="o",
            markersize=3,
            label=label,
        )
    axis.axvline(0.99, color="grey", linewidth=0.8)
    axis.set_yticks(rows, names, fontsize=8)
    axis.invert_yaxis()
    axis.set_title(f"Clear faults ({CLEAR_SIGMAS} standard deviations or more), 95 % intervals")
    axis.legend(fontsize=8)


def _false(axis: Any, scores: Headline) -> None:
    names = [name for name, one in scores.classes.items() if one.false_per_10000.iterations]
    rates = [scores.classes[name].false_per_10000 for name in names]
    rows = np.arange(len(names))
    axis.barh(rows, [rate.value for rate in rates])
    axis.plot([rate.interval[1] for rate in rates], rows, "|", color="black")
    axis.set_yticks(rows, names, fontsize=7)
    axis.invert_yaxis()
    axis.set_title("False incidents per 10,000 healthy iterations, and upper bounds")


def _steps(matched: Sequence[Matched]) -> list[Finding]:
    """Return the lasting shifts after a healthy past that cost something, however small beside the noise."""
    return [
        finding
        for one in matched
        for finding in one.findings
        if finding.answer.asked == "incident" and finding.answer.has_past and finding.answer.shape == "step"
    ]


def _corpus_recall(axis: Any, matched: Sequence[Matched]) -> None:
    findings = _steps(matched)
    sigmas = np.array([finding.answer.shift_sigmas for finding in findings])
    found = np.array([finding.is_found for finding in findings], np.float64)
    middle, share, count = [], [], []
    for low, high in pairwise(_BINS):
        inside = (sigmas >= low) & (sigmas < high)
        if inside.any():
            middle.append(float(np.median(sigmas[inside])))
            share.append(float(found[inside].mean()))
            count.append(int(inside.sum()))
    axis.plot(middle, share, "o-")
    for x, y, n in zip(middle, share, count, strict=True):
        axis.annotate(str(n), (x, y), fontsize=7, textcoords="offset points", xytext=(3, -10))
    axis.axvline(CLEAR_SIGMAS, color="grey", linewidth=0.8)
    axis.set(xscale="log", xlabel="shift / noise", ylim=(0, 1.03), title="Corpus, steps of 10 % or more: recall")
    _readable(axis.xaxis)


def _corpus_delay(axis: Any, matched: Sequence[Matched]) -> None:
    findings = [finding for finding in _steps(matched) if is_prompt(finding)]
    sigmas = np.array([finding.answer.shift_sigmas for finding in findings])
    axis.plot(sigmas, [delay(finding) for finding in findings], ".", markersize=3)
    _bound(axis, np.geomspace(0.5, 30.0, 100))
    axis.set(
        xscale="log", yscale="log", xlabel="shift / noise", title="Corpus, steps: slow iterations until it was said"
    )
    _readable(axis.xaxis)
    _readable(axis.yaxis)
    axis.legend(fontsize=8)


def _real(axis: Any, curves: Sequence[Curve], field: str) -> None:
    styles = {"step": "-", "ramp": "--", "staircase": ":"}
    colors = {noise: f"C{n}" for n, noise in enumerate(dict.fromkeys(curve.noise for curve in curves))}
    for shape, style in styles.items():
        for noise, color in colors.items():
            line = [curve for curve in curves if (curve.shape, curve.noise) == (shape, noise)]
            label = f"{shape}, {noise}"
            values = [getattr(curve, field) for curve in line]
            axis.plot([curve.shift_sigmas for curve in line], values, style, color=color, label=label)
    if field == "delay" and curves:
        _bound(axis, np.geomspace(0.5, 6.0, 100))
        axis.set(yscale="log")
        _readable(axis.yaxis)
    axis.set(xscale="log", xlabel="shift / noise", title=f"Spliced into the noise of real series: {field}")
    if curves:
        _readable(axis.xaxis)
        axis.legend(fontsize=7, ncols=2)


def _readable(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _bound(axis: Any, sigmas: FloatArray) -> None:
    bound = np.maximum(2 * np.log(_FALSE_EVERY) / sigmas**2, 1.0)
    axis.plot(sigmas, bound, color="black", linewidth=0.8, label="ln(10,000) / KL")
    axis.plot(sigmas, 1.5 * bound + 2, color="black", linewidth=0.8, linestyle="--", label="1.5 of it, and 2")
