"""What the trace of some steps says: launches, kernels, and the time between them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import profiles
from benchmarks.profiles import Profile, kind_of, summary


def event(name, ts, dur, cat="kernel"):
    return {"name": name, "ts": ts, "dur": dur, "cat": cat}


# two steps: the first begins with an empty queue and has long gaps, the second has one of 1 in 10 microseconds
EVENTS = [
    *(event("nvjet_first", 0, 1), event("_gate_forward", 5, 1), event("nvjet_first", 9, 1)),
    *(event("nvjet_first", 10, 4), event("Memcpy HtoD", 12, 4, "gpu_memcpy"), event("_gate_forward", 17, 3)),
    *(event("cudaLaunchKernel", 0, 1, "cuda_runtime"), event("cuLaunchKernelEx", 1, 1, "cuda_driver")),
    *(event("cudaGraphLaunch", 2, 1, "cuda_runtime"), event("cudaMemcpyAsync", 2, 1, "cuda_runtime")),
    {"name": "a mark without a duration", "ts": 3, "cat": "kernel"},
]


def test_a_trace_has_launches_kernels_and_gaps():
    found = summary(EVENTS[::-1], steps=2)
    assert found["kernels"] == [
        {"name": "nvjet_first", "count": 1.5, "us": 3.0},
        {"name": "_gate_forward", "count": 1.0, "us": 2.0},
        {"name": "Memcpy HtoD", "count": 0.5, "us": 2.0},
    ]
    assert found["us_by_kind"] == {"matmul": 3.0, "ours": 2.0, "copy": 2.0}
    assert (found["kernels_per_step"], found["launches_per_step"]) == (3.0, 1.5)
    assert found["busy_us"] == (3 + 9) / 2  # what overlaps counts once
    assert found["idle_share"] == 1 / 10  # of the second step alone


def test_a_trace_without_kernels_has_no_idle_share():
    assert summary([event("cudaLaunchKernel", 0, 1, "cuda_runtime")], steps=1)["idle_share"] is None


def test_the_trace_of_a_large_model_is_read(monkeypatch):
    args = {f"field {number}": 1 for number in range(40)}
    events = [{**event("nvjet", 2 * number, 1), "args": args} for number in range(26_000)]

    def export(path):
        Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")

    made = SimpleNamespace(start=lambda: None, stop=lambda: None, export_chrome_trace=export)
    monkeypatch.setattr(profiles.torch.profiler, "profile", lambda activities: made)
    profile = Profile("cuda", steps=10)
    profile.start()
    profile.stop()
    assert profile.found()["kernels_per_step"] == len(events) / 10


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_f16_knob_7_64x128x64_4x1x1_kernel0_0", "attention"),
        ("_gate_backward", "ours"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", "matmul"),
        ("sm80_xmma_gemm_bf16f32_bf16f32_f32_nn_n_tilesize64x64x64_stage3", "matmul"),
        ("void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdam>", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("triton_poi_fused_add_mul_3", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, FillFunctor<float>>", "elementwise"),
        ("ampere_something_new", "other"),
    ],
)
def test_kernels_are_grouped_by_kind(kernel, kind):
    assert kind_of(kernel) == kind
