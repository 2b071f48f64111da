"""TensorBoard's plugins without charts that have one point at most.

A run that is validated once has one value of each validation loss. The hyperparameters' tab shows it, a chart of it
shows nothing. Event files keep it: other commands read it there, and that tab takes its results from scalars alone.
"""

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

from tensorboard import default  # type: ignore[import-untyped]
from tensorboard.data.provider import RunTagFilter  # type: ignore[import-untyped]
from tensorboard.plugins.custom_scalar.custom_scalars_plugin import (  # type: ignore[import-untyped]
    CustomScalarsPlugin,
)
from tensorboard.plugins.metrics.metrics_plugin import MetricsPlugin  # type: ignore[import-untyped]
from tensorboard.plugins.scalar.metadata import PLUGIN_NAME  # type: ignore[import-untyped]
from tensorboard.plugins.scalar.scalars_plugin import ScalarsPlugin  # type: ignore[import-untyped]

Series = Mapping[str, Mapping[str, Any]]  # run -> tag -> what is known of it


class ChartedScalars:
    """A data provider that lists only scalars of which some run has two points.

    While no scalar has two, as in a run that has just begun, all are listed.

    Args:
        provider: TensorBoard's, which answers everything else.
    """

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._curves: set[str] = set()  # curves only grow

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)

    def list_scalars(self, *args: Any, **options: Any) -> Series:
        """The scalars, as TensorBoard's own."""
        series: Series = self._provider.list_scalars(*args, **options)
        shown = self.charted(options["experiment_id"], args)
        return {run: {tag: of for tag, of in tags.items() if tag in shown} for run, tags in series.items()}

    def charted(self, experiment: str, context: tuple[Any, ...]) -> set[str]:
        """Scalars of which some run has two points; if there are none, all.

        Args:
            experiment: TensorBoard's name of all that it shows.
            context: Of the request.
        """
        options = {"experiment_id": experiment, "plugin_name": PLUGIN_NAME}
        series: Series = self._provider.list_scalars(*context, **options)
        for run, tags in series.items():
            if unknown := tags.keys() - self._curves:
                wanted = RunTagFilter(runs=[run], tags=unknown)
                points = self._provider.read_scalars(*context, **options, downsample=2, run_tag_filter=wanted)
                self._curves |= {tag for tag, values in points.get(run, {}).items() if len(values) > 1}
        return self._curves or {tag for tags in series.values() for tag in tags}


class Scalars(ScalarsPlugin):  # type: ignore[misc]
    """The tab Scalars."""

    def __init__(self, context: Any) -> None:
        super().__init__(_charted(context))


class TimeSeries(MetricsPlugin):  # type: ignore[misc]
    """The tab Time Series."""

    def __init__(self, context: Any) -> None:
        super().__init__(_charted(context))


class CustomScalars(CustomScalarsPlugin):  # type: ignore[misc]
    """The tab Custom Scalars, without charts that have no curve. One with a curve may have single points, too."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._charted_scalars = ChartedScalars(context.data_provider)

    def layout_impl(self, ctx: Any, experiment: str) -> Any:
        """The layout, as TensorBoard's own."""
        layout = super().layout_impl(ctx, experiment)
        content = json.loads(layout) if isinstance(layout, str) else layout
        tags = self._charted_scalars.charted(experiment, (ctx,))
        for group in content.get("category", []):
            group["chart"] = [chart for chart in group.get("chart", []) if _has_curve(chart, tags)]
        if groups := [group for group in content.get("category", []) if group["chart"]]:
            return {**content, "category": groups}
        return layout


def plugins() -> list[Any]:
    """TensorBoard's own plugins, which read event files only.

    The projector is not among them: it sends any file that a run's ``projector_config.pbtxt`` names.
    """
    replaced = {ScalarsPlugin: Scalars, MetricsPlugin: TimeSeries, CustomScalarsPlugin: CustomScalars}
    return [replaced.get(plugin, plugin) for plugin in default.get_static_plugins()]


def _charted(context: Any) -> Any:
    own = copy.copy(context)
    own.data_provider = ChartedScalars(context.data_provider)
    return own


def _has_curve(chart: Mapping[str, Any], tags: set[str]) -> bool:
    """Whether a scalar with two points is in a chart; one of another type than ours is kept."""
    patterns = chart.get("multiline", {}).get("tag")
    return patterns is None or any(re.match(pattern, tag) for pattern in patterns for tag in tags)
