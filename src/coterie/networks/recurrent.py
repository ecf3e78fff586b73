"""LSTM networks for sequences of tokens. ``vmap`` cannot map LSTMs: they need engine ``loop``."""

from typing import Annotated

from torch import Tensor, nn

from ..core.ranges import Interval
from .blocks import Shape, head, refuse_other_than_tokens

Vocabulary = Annotated[int, Interval(ge=1, le=10_000_000)]


def char_lstm(shape: Shape, classes: int, *, vocabulary: Vocabulary | None = None) -> nn.Module:
    """LEAF's Shakespeare network: embedding 8, two LSTM layers of 256; predicts the next symbol.

    vocabulary: the number of different tokens, at least what the data has; by default just that
    """
    refuse_other_than_tokens("char_lstm", shape)
    return Recurrent(vocabulary or classes, classes, embedding=8, hidden=256)


def word_lstm(shape: Shape, classes: int, *, vocabulary: Vocabulary | None = None) -> nn.Module:
    """P3's Reddit network: two LSTM layers of 200, embedding 200 tied to the output, dropout 0.2.

    Dropout is after the embedding and after each layer; train.dropout sets another rate.

    vocabulary: the number of different tokens, at least what the data has; by default just that
    """
    refuse_other_than_tokens("word_lstm", shape)
    return Recurrent(vocabulary or classes, classes, embedding=200, hidden=200, dropout=0.2)


def next_token_lstm(
    shape: Shape, classes: int, *, vocabulary: Vocabulary | None = None
) -> nn.Module:
    """P3's Reddit network as P3 trains it: word_lstm with an output at every position.

    It needs data with a target at every position (data.targets = "every").

    vocabulary: the number of different tokens, at least what the data has; by default just that
    """
    refuse_other_than_tokens("next_token_lstm", shape)
    tokens = max(vocabulary or classes, classes)
    sizes = {"embedding": 200, "hidden": 200}
    return Recurrent(tokens, classes, **sizes, dropout=0.2, every_position=True)


class Recurrent(nn.Module):
    """Two LSTM layers over tokens; the state of the last, or every, position predicts a class."""

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        *,
        embedding: int,
        hidden: int,
        dropout: float = 0.0,
        every_position: bool = False,
    ) -> None:
        super().__init__()
        self.every_position = every_position
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.drop = nn.Dropout(dropout)
        layers = (nn.LSTM(width, hidden, batch_first=True) for width in (embedding, hidden))
        self.lstm = nn.ModuleList(layers)
        self.head = head(hidden, classes)
        if embedding == hidden and vocabulary == classes:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes for every sequence, or for every position of it."""
        states = self.drop(self.embedding(x))
        for layer in self.lstm:
            states = self.drop(layer(states)[0])
        scores: Tensor = self.head(states if self.every_position else states[:, -1])
        return scores
