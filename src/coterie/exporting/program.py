"""An exported model as one program of tensors: for ``torch.export``, and as a file of ONNX.

The input is encoded samples (a table's features in the order of its schema, pixels, tokens), the
output probabilities of the classes, or values in the target's unit: scaling, all networks of a
mixture and their weights are part of the program.
"""

import copy
import json
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..storage import files
from .exported_model import ExportedModel

MISSING = "an ONNX file needs the packages of an extra ({}): pip install 'coterie[onnx]'"


class Program(nn.Module):
    """The whole of a model, from encoded samples to answers."""

    scale: Tensor | None
    shift: Tensor | None
    fill: Tensor | None
    weights: Tensor

    def __init__(self, model: ExportedModel) -> None:
        super().__init__()
        self.regression = model.preprocessing.schema.regression
        self.dtype = model.config.network.dtype
        ready = model.preprocessing.scaled(model.preprocessing.schema.example())
        moments = model.preprocessing.moments
        self.register_buffer("scale", None if ready.scale is None else ready.scale.to(self.dtype))
        self.register_buffer("shift", None if ready.shift is None else ready.shift.to(self.dtype))
        self.register_buffer("fill", None if moments is None else torch.tensor(moments.mean))
        self.unit = (moments.target_std, moments.target_mean) if moments else (1.0, 0.0)
        self.register_buffer("weights", model.predictor.weights.clone())
        self.networks = nn.ModuleList()
        for w in model.predictor.models:
            network = copy.deepcopy(model.network.module)
            network.load_state_dict(model.network.state_dict(w))
            self.networks.append(network)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Probabilities ``[n, classes]``, or values ``[n]``."""
        if self.fill is not None:
            x = torch.where(x.isnan(), self.fill.to(x.dtype), x)
        if x.dtype != torch.int64:
            x = x.to(self.dtype)
        if self.scale is not None and self.shift is not None:
            x = x * self.scale + self.shift
        parts = [network(x) for network in self.networks]
        parts = [h.squeeze(-1) if self.regression else h.softmax(-1) for h in parts]
        total = torch.stack([w * h for w, h in zip(self.weights, parts, strict=True)]).sum(0)
        return total.double() * self.unit[0] + self.unit[1] if self.regression else total


def program(model: ExportedModel) -> torch.export.ExportedProgram:
    """The model as ``torch.export`` gives it, for any number of samples."""
    sample = model.preprocessing.schema.example().x.repeat_interleave(2, 0)
    free = ({0: torch.export.Dim("samples")},)
    return torch.export.export(Program(model), (sample,), dynamic_shapes=free)


def write_onnx(model: ExportedModel, path: str | Path) -> Path:
    """Write the model as an ONNX file with the names of its features and classes; its path."""
    made = program(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own code
        try:
            found = torch.onnx.export(made, input_names=["x"], output_names=["y"], verbose=False)
        except ImportError as error:
            raise ConfigError(MISSING.format(error)) from error
    schema = model.preprocessing.schema
    found.model.metadata_props["coterie"] = json.dumps(  # type: ignore[union-attr]
        {"features": schema.feature_names, "classes": schema.target.classes}
    )
    with files.whole(Path(path)) as temporary:
        found.save(temporary)  # type: ignore[union-attr]
    return Path(path)
