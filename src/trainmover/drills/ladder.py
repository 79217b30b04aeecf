"""The picture of `bench ablation`: downtime per part, log scale, a group of bars per run.

Decides the drawing only. Needs matplotlib (the `report` extra).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from trainmover.drills.bench_ablation import NAMES, TITLES, medians_of
from trainmover.drills.bench_file import Samples
from trainmover.errors import ConfigError

COLOURS: Final = ("#9d755d", "#f58518", "#4c78a8", "#54a24b")


def draw(path: Path, samples: Samples) -> None:
    """Write the picture to `path`. Raises ConfigError where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "the picture needs matplotlib: pip install 'trainmover[report]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    runs = samples["runs"]
    figure, axes = pyplot.subplots(figsize=(2.4 + 2.6 * len(runs), 4.2), layout="constrained")
    width = 0.8 / len(NAMES)
    for place, run in enumerate(runs):
        _draw_run(axes, place, run, width)
    axes.set_yscale("log")
    axes.set_xticks(
        [place + 1.5 * width for place in range(len(runs))],
        [f"{run['mode']}, {run['ranks']} ranks" for run in runs],
    )
    axes.set_ylabel("downtime of an unplanned loss, s (log)")
    handles = [Patch(color=colour) for colour in COLOURS]
    titles = [TITLES[name] for name in NAMES]
    figure.legend(handles, titles, loc="outside upper left", ncols=2, fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_run(axes: Any, place: int, run: dict[str, Any], width: float) -> None:
    medians = medians_of(run)
    for index, (name, colour) in enumerate(zip(NAMES, COLOURS, strict=True)):
        values = [max(1e-4, sample["downtime_s"]) for sample in run["stages"][name]]
        height, at = max(1e-4, medians[name]), place + index * width
        axes.bar(at, height, width=0.92 * width, color=colour)
        axes.vlines(at, min(values), max(values), color="#333333", linewidth=1)
        axes.text(at, 1.06 * max(values), f"{height:.2f}", ha="center", va="bottom", size=8)
