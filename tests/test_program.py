"""An exported model as one program of tensors answers as ``predict`` does."""

import numpy as np
import pytest
import torch

import coterie
from coterie.cli import main


def made(place, kind, **asked):
    """A run on two sites, the export of one, samples, and their answers."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    if kind == "images":
        x = rng.integers(0, 255, size=(60, 1, 9, 9)).astype(np.uint8)
    else:
        x[3, 1] = np.nan
    if kind == "numbers":
        y = 100 + 5.0 * x[:, 0]
    data = {"a": (x[:30], y[:30]), "b": (x[30:], y[30:])}
    coterie.run(data=data, rounds=1, engine="loop", out=place / "run", **asked)
    return x, coterie.load_export(coterie.export(place / "run", "a", place / "export"))


@pytest.mark.parametrize(
    ("kind", "asked"),
    [("features", {"method": "fedem"}), ("numbers", {}), ("images", {"model": "linear"})],
)
def test_the_program_answers_as_predict(tmp_path, kind, asked):
    """Gaps, pixels, mixtures and the target's unit are inside; any number of samples fits."""
    x, model = made(tmp_path, kind, **asked)
    program = model.program().module()
    for count in (1, 60):
        found = program(torch.from_numpy(x[:count])).detach().numpy()
        assert found == pytest.approx(model.predict(x[:count]).values, rel=1e-6, abs=1e-7)


def test_an_onnx_file_answers_as_torch(tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    x, model = made(tmp_path, "features", method="fedem")
    asked = ["export", str(tmp_path / "run"), "--client", "a", "--out", str(tmp_path / "more")]
    with pytest.raises(SystemExit, match="0"):
        main([*asked, "--onnx"])
    session = runtime.InferenceSession(tmp_path / "more" / "model.onnx")
    (found,) = session.run(None, {"x": x})
    assert found == pytest.approx(model.predict(x).values, abs=1e-6)
    assert coterie.load_export(tmp_path / "more").predict(x).labels == model.predict(x).labels
