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


def answers_as_predict(program, model, x):
    """Whether the program answers any number of samples as ``predict`` does."""
    for count in (1, len(x)):
        found = program(torch.from_numpy(x[:count])).detach().numpy()
        assert found == pytest.approx(model.predict(x[:count]).values, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("kind", ["numbers", "images"])
def test_the_program_answers_as_predict(tmp_path, kind):
    """Gaps, pixels, and the target's unit are inside."""
    x, model = made(tmp_path, kind, model="linear")
    answers_as_predict(model.program().module(), model, x)


def test_an_onnx_file_answers_as_torch(tmp_path):
    """Of a mixture of models, too."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    x, model = made(tmp_path, "features", method="fedem", model="linear")
    asked = ["export", str(tmp_path / "run"), "--client", "a", "--out", str(tmp_path / "more")]
    with pytest.raises(SystemExit, match="0"):
        main([*asked, "--onnx"])
    session = runtime.InferenceSession(tmp_path / "more" / "model.onnx")
    answers_as_predict(lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), model, x)
