"""The page's plots, drawn by BokehJS in the reader's browser out of models made here.

Nothing here executes code of its own in the page: no callbacks in models (they would need `eval`, which the page's
policy forbids); the page's one script changes the models' data and colours through their properties.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import UsageError
from introspect_cli.render.text import clean

if TYPE_CHECKING:
    from introspect_cli.health.history import Depth

TOOLS = "pan,wheel_zoom,box_zoom,reset,save"


def bokeh_script() -> str:
    """BokehJS itself.

    Raises:
        UsageError: the package is not installed.
    """
    try:
        import bokeh
    except ImportError:
        raise UsageError('a report needs bokeh: `pip install "introspect-cli[report]"`') from None
    path = Path(bokeh.__file__).parent / "server" / "static" / "js" / "bokeh.min.js"
    return path.read_text(encoding="utf-8")


def _figure(name: str, height: int, **options: Any) -> Any:
    from bokeh.plotting import figure

    plot = figure(
        name=name, height=height, sizing_mode="stretch_width", tools=TOOLS, active_scroll=None,
        output_backend="canvas", toolbar_location="above", **options,
    )  # fmt: skip
    plot.toolbar.logo = None
    plot.background_fill_color = None
    plot.border_fill_color = None
    plot.outline_line_color = None
    return plot


def _item(plot: Any) -> Any:
    from bokeh.embed import json_item

    return json_item(plot)


def map_item(rows: int, steps: list[int], longest: int) -> Any:
    """The divergence map: an image whose pixels the page fills in, and a frame around the selected cell.

    Args:
        rows: modules there are.
        steps: steps across.
        longest: characters of the longest name of a module.
    """
    from bokeh.models import ColumnDataSource, FixedTicker, LinearColorMapper, Range1d

    width, height = max(len(steps), 1), max(rows, 1)
    plot = _figure(
        "map", min(640, max(220, 18 * rows + 80)),
        x_range=Range1d(0, width, bounds=(0, width), min_interval=2),
        y_range=Range1d(height, 0, bounds=(0, height), min_interval=2),
        x_axis_label="step", min_border_left=30 + 6 * min(longest, 40),
    )  # fmt: skip
    mapper = LinearColorMapper(palette=["#000000"] * 256, low=0, high=255, name="map-colours")
    image = ColumnDataSource({"image": [], "x": [], "y": [], "dw": [], "dh": []}, name="map-image")
    plot.image("image", source=image, x="x", y="y", dw="dw", dh="dh", color_mapper=mapper)
    chosen = ColumnDataSource({"x": [], "y": []}, name="map-chosen")
    plot.rect("x", "y", 1, 1, source=chosen, fill_alpha=0, line_width=6, line_color="#ffffff", name="map-halo")
    plot.rect("x", "y", 1, 1, source=chosen, fill_alpha=0, line_width=2, line_color="#000000", name="map-frame")
    for axis in (plot.xaxis[0], plot.yaxis[0]):
        axis.ticker = FixedTicker(ticks=[])
    plot.grid.visible = False
    return _item(plot)


def history_item(*, log: bool) -> Any:
    """Lines of a and b over the steps, and a band of the noise runs; data come from the page."""
    from bokeh.models import ColumnDataSource, DataRange1d, HoverTool

    name = "log" if log else "linear"
    plot = _figure(
        f"history-{name}", 340, x_range=DataRange1d(), y_range=DataRange1d(), x_axis_label="step",
        y_axis_type="log" if log else "linear",
    )  # fmt: skip
    band = ColumnDataSource({"x": [], "low": [], "high": []}, name=f"{name}-noise")
    plot.varea("x", "low", "high", source=band, fill_alpha=0.25, name="noise-band")
    for run, dash in (("a", "solid"), ("b", "dashed")):
        source = ColumnDataSource({"x": [], "y": []}, name=f"{name}-{run}")
        plot.line("x", "y", source=source, line_width=2, line_dash=dash, name=f"line-{run}")
        dots = plot.scatter("x", "y", source=source, size=5, name=f"dots-{run}")
        plot.add_tools(
            HoverTool(renderers=[dots], mode="mouse", tooltips=[("run", run), ("step", "@x"), ("value", "@y")])
        )
    return _item(plot)


def depth_item(parts: list[tuple[str, Depth]]) -> Any:
    """Scales along the depth: median over the steps, and the span from the 10th to the 90th percentile.

    Args:
        parts: run and direction (`a forward`, `b gradient`, ...), and what was found.
    """
    from bokeh.models import ColumnDataSource, HoverTool

    plot = _figure("depth", 340, y_axis_type="log", x_axis_label="module, in execution order")
    for name, found in parts:
        own = [(row, found.names[row]) for row in range(len(found.names)) if found.middle[row] > 0]
        floor = min((found.middle[row] for row, _ in own), default=1.0) * 1e-3
        source = ColumnDataSource(
            {
                "x": [row for row, _ in own],
                "y": [found.middle[row] for row, _ in own],
                "low": [max(found.low[row], floor) for row, _ in own],
                "high": [found.high[row] for row, _ in own],
                "name": [clean(text, 120) for _, text in own],
            }
        )
        kind = name.replace(" ", "-")
        plot.varea("x", "low", "high", source=source, fill_alpha=0.15, name=f"area-{kind}")
        dash = "dashed" if name.startswith("b") else "solid"
        plot.line("x", "y", source=source, line_width=2, line_dash=dash, name=f"line-{kind}", legend_label=name)
        dots = plot.scatter("x", "y", source=source, size=5, name=f"dots-{kind}")
        tips = [("module", "@name"), (name, "@y")]
        plot.add_tools(HoverTool(renderers=[dots], mode="mouse", tooltips=tips))
    if parts:
        legend = plot.legend[0]
        legend.click_policy, legend.orientation, legend.border_line_color = "hide", "horizontal", None
        legend.background_fill_color = None
        plot.add_layout(legend, "above")
    return _item(plot)
