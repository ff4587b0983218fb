"""Plots as in SlackTier's figures 1, 3 and 4, from replays, plans and windows. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierd.errors import TierdError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FORMATS = ("svg", "png")
_COLORS = ("#0b6e99", "#d9730d", "#4d6461", "#9065b0", "#e03e3e", "#0f7b6c")


def _start() -> Any:
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra
    except ImportError:
        raise TierdError(
            "plots need matplotlib, which is not installed; run: pip install 'tierd[plots]'"
        ) from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    # The same data gives the same file: no date, no random ids; text stays text.
    mpl.rcParams.update(
        {
            "svg.hashsalt": "tierd",
            "svg.fonttype": "none",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.25,
            "font.size": 9,
        }
    )
    return plt


def _save(pyplot: Any, figure: Any, stem: Path) -> list[str]:
    figure.tight_layout()
    written = []
    for form in FORMATS:
        path = stem.with_suffix(f".{form}")
        metadata = {"Date": None} if form == "svg" else {}
        figure.savefig(path, dpi=110, metadata=metadata)
        written.append(str(path))
    pyplot.close(figure)
    return written


def miss_curves(replayed: dict[str, Any], stem: Path) -> list[str]:
    """Plot each table's miss ratio over cache rows, a line a policy.

    Args:
        replayed: what ``tools.trace.replay`` returned.
        stem: path without a suffix.

    Returns:
        the files written.
    """
    pyplot = _start()
    tables = replayed["tables"]
    figure, axes = pyplot.subplots(
        1, len(tables), figsize=(3.4 * len(tables) + 0.6, 2.9), sharey=True, squeeze=False
    )
    for axis, table in zip(axes[0], tables, strict=True):
        for color, (policy, hits) in zip(_COLORS, table["hit_ratio"].items(), strict=False):
            miss = [100 * (1 - hit) for hit in hits]
            axis.plot(table["sizes"], miss, marker=".", color=color, label=policy)
        axis.set_xscale("log")
        axis.set_ylim(0, 100)
        axis.set_title(table["name"])
        axis.set_xlabel("cache rows")
    axes[0][0].set_ylabel("lookups that miss, %")
    axes[0][-1].legend(frameon=False)
    return _save(pyplot, figure, stem)


def split(found: dict[str, Any], stem: Path) -> list[str]:
    """Plot the growth of the step over the first table's share of the cache (figure 3).

    Args:
        found: what ``tools.trace.splits`` returned.
        stem: path without a suffix.
    """
    pyplot = _start()
    figure, axis = pyplot.subplots(figsize=(4.2, 2.9))
    best: dict[float, dict[str, Any]] = {}
    for one in found["splits"]:  # of three tables and more: the best of each share
        held = best.setdefault(one["share"], one)
        if one["growth_ms"] < held["growth_ms"]:
            best[one["share"]] = one
    shares = sorted(best)
    axis.plot(
        shares, [best[s]["growth_ms"] for s in shares], marker="o", ms=3, color=_COLORS[0],
        label="step growth",
    )  # fmt: skip
    for number, name in enumerate(found["tables"]):
        late = [best[s]["stalls_ms"][number] for s in shares]
        color = _COLORS[number + 1]
        axis.plot(shares, late, ls=":", color=color, label=f"stall at {name}")
    axis.set_xlabel(f"share f of the cache for {found['tables'][0]}")
    axis.set_ylabel("ms a step")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    return _save(pyplot, figure, stem)


def windows(rows: Sequence[dict[str, Any]], stem: Path, *, step_ms: float = 0.0) -> list[str]:
    """Plot windows against read times, one group of bars a table (figures 1 and 4, bottom).

    Args:
        rows: per table ``name``, ``window_ms`` and ``reads``: what it is called -> ms.
        stem: path without a suffix.
        step_ms: the step's length; 0 when unknown.
    """
    pyplot = _start()
    labels, lengths, colors = [], [], []
    for row in rows:
        labels.append(f"{row['name']}: window")
        lengths.append(row["window_ms"])
        colors.append("#bcc5c9")
        for number, (name, read) in enumerate(row["reads"].items()):
            labels.append(f"{row['name']}: {name}")
            lengths.append(read)
            late = read > row["window_ms"]
            colors.append("#e03e3e" if late else _COLORS[number % 2 * 5])
    figure, axis = pyplot.subplots(figsize=(5.6, 0.34 * len(labels) + 1.0))
    places = range(len(labels))
    axis.barh(places, lengths, color=colors, height=0.7)
    for place, length in zip(places, lengths, strict=True):
        axis.text(length, place, f" {length:.2f}", va="center", fontsize=8)
    axis.set_yticks(list(places), labels)
    axis.invert_yaxis()
    axis.set_xlabel("ms since the step starts (a read that is late is red)")
    axis.set_xlim(0, max([*lengths, 1e-3]) * 1.15)
    if step_ms:
        axis.set_title(f"a step of {step_ms:.1f} ms")
    axis.grid(visible=False, axis="y")
    return _save(pyplot, figure, stem)


def layer_windows(layers: dict[int, dict[int, float]], step_s: dict[int, float], stem: Path) -> Any:
    """Plot each layer's window as a share of the step, a line a batch size (figure 4, top)."""
    pyplot = _start()
    figure, axis = pyplot.subplots(figsize=(4.6, 2.9))
    batches = sorted({batch for windows in layers.values() for batch in windows})
    for color, batch in zip(_COLORS, batches, strict=False):
        shown = [n for n in sorted(layers) if batch in layers[n]]
        step = step_s.get(batch, 0.0)
        unit = step or 1e-3
        label = f"B={batch}" + (f", {step * 1e3:.1f} ms step" if step else "")
        axis.plot(
            shown, [layers[n][batch] / unit for n in shown], marker=".", color=color, label=label
        )
    axis.set_xlabel("layer that reads the table")
    axis.set_ylabel("window, share of a step" if step_s else "window, ms")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    return _save(pyplot, figure, stem)
