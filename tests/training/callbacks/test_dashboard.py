"""What TensorBoard is told beside the scalars: layout, hyperparameters, histograms."""

import re

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lightning_llm.training.callbacks.dashboard import LAYOUT, RESULTS

RECALL = {"val_recall_loss", "val_other_loss"}
DASHBOARD = "lightning_llm.training.callbacks.Dashboard"


def with_dashboard(**options):
    return {"trainer.callbacks": [{"class_path": DASHBOARD, "init_args": options}]}


def events_of(cli):
    events = EventAccumulator(str(cli.trainer.log_dir), size_guidance={"histograms": 0})
    events.Reload()
    return events


def hparams_of(events, name):
    content = events.SummaryMetadata(f"_hparams_/{name}").plugin_data.content
    return getattr(HParamsPluginData.FromString(content), name)


def test_the_layout_puts_training_and_validation_into_one_chart(tiny):
    events = events_of(tiny("fit", **with_dashboard()))
    (entry,) = events.Tensors("custom_scalars__config__")
    layout = Layout.FromString(entry.tensor_proto.string_val[0])
    charts = {
        (group.title, chart.title): list(chart.multiline.tag) for group in layout.category for chart in group.chart
    }
    assert charts == {(group, title): tags for group, of in LAYOUT.items() for title, tags in of.items()}
    assert max(len(title) for of in LAYOUT.values() for title in of) <= 45  # one line above a chart
    groups = {"loss", "optimization", "memory", "throughput", "recall", "loss by data source"}
    assert {group for group, _ in charts} == groups
    shown = {
        key: [tag for tag in events.Tags()["scalars"] if any(re.match(pattern, tag) for pattern in patterns)]
        for key, patterns in charts.items()
    }
    assert set(shown["loss", "training and validation, nats/token"]) == {"train_loss", "val_loss"}
    assert set(shown["recall", "recall loss and other loss, nats/token"]) == RECALL
    assert shown["optimization", "learning rate"] == ["learning_rate"]
    assert shown["optimization", "gradient norm before clipping"] == ["grad_norm"]
    assert shown["throughput", "tokens per second"]
    assert all(len(tags) <= 1 for (group, _), tags in shown.items() if group in ("optimization", "memory"))


def test_hyperparameters_have_results(tiny):
    cli = tiny("fit", **with_dashboard())
    events = events_of(cli)
    announced = [info.name.tag for info in hparams_of(events, "experiment").metric_infos]
    assert tuple(announced) == RESULTS
    losses = {"val_loss", "val_perplexity", "val_bits_per_byte", "train_loss_eval", *RECALL}
    assert losses <= set(events.Tags()["scalars"]) & set(RESULTS)
    values = hparams_of(events, "session_start_info").hparams
    assert values["hidden_size"].number_value == 32
    assert values["optimizer"].string_value == "AdamW"
    assert values["optimizer.lr"].number_value == 0.001
    assert values["qk_norm"].string_value == "false"
    assert values["trainer.precision"].string_value == cli.trainer.precision
    assert "trainer.default_root_dir" not in values
    assert hparams_of(events, "session_end_info").status == 1  # success


def test_histograms_are_written_on_demand(tiny):
    cli = tiny("fit", **with_dashboard(histograms_every_n_steps=2), **{"data.micro_batch_size": 4})
    events = events_of(cli)
    names = {name for name, _ in cli.model.named_parameters()}
    assert set(events.Tags()["histograms"]) == {f"{kind}/{name}" for kind in ("weights", "gradients") for name in names}
    for kind in ("weights", "gradients"):
        entries = events.Histograms(f"{kind}/transformer.norm.weight")
        assert [entry.step for entry in entries] == [2, 4, 6]
    last = events.Histograms("weights/transformer.lm_head.weight")[-1].histogram_value
    weight = cli.model.transformer.lm_head.weight
    assert last.num == weight.numel()
    assert last.max == pytest.approx(weight.max().item())


def test_gradients_are_those_before_clipping(tiny):
    clipped = events_of(
        tiny("fit", **with_dashboard(histograms_every_n_steps=1), **{"trainer.gradient_clip_val": 1e-6})
    )
    assert clipped.Histograms("gradients/transformer.lm_head.weight")[0].histogram_value.max > 1e-5


def test_by_default_there_are_none(tiny):
    assert not events_of(tiny("fit", **with_dashboard())).Tags()["histograms"]


def test_other_loggers_are_left_alone(tiny):
    tiny("fit", **with_dashboard(histograms_every_n_steps=1), **{"trainer.logger": False})


@pytest.mark.parametrize("interval", [0, -1])
def test_an_interval_below_one_is_one_line(tiny, error_line, interval):
    with pytest.raises(SystemExit) as leaving:
        tiny("fit", **with_dashboard(histograms_every_n_steps=interval))
    assert leaving.value.code == 2
    assert f"histograms_every_n_steps must be at least 1, or null for none, got {interval}" in error_line()
