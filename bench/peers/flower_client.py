"""What a Flower client does, in a module of its own so that an actor keeps its data and network."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from networks import data, network

app = ClientApp()


@functools.cache
def built(model: str, shape: tuple[int, ...], clients: int, samples: int) -> tuple[Any, Any]:
    """The network and every client's data, once an actor."""
    torch.set_num_threads(1)  # an actor a core
    return network(model), data({"shape": shape, "clients": clients, "samples": samples})


@app.train()
def train(message: Message, context: Context) -> Message:
    """One local epoch from the server's parameters."""
    job = message.content["config"]
    module, parts = built(job["model"], tuple(job["shape"]), job["clients"], job["samples"])
    x, y = parts[context.node_config["partition-id"]]
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    rule = torch.optim.SGD(module.parameters(), lr=job["lr"])
    steps = 0
    for batch in torch.randperm(len(y)).split(job["batch"]):
        rule.zero_grad(set_to_none=True)
        F.cross_entropy(module(x[batch]), y[batch]).backward()
        rule.step()
        steps += 1
    metrics = MetricRecord({"num-examples": len(y), "steps": steps})
    content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
