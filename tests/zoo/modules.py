"""Small modules as people write them, of the kinds that transformers does not have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

WIDTH, HEADS, CLASSES, TOKENS = 16, 2, 5, 40


class Encoder(nn.Module):
    """torch's own encoder, causal or not."""

    def __init__(self, causal: bool = False, dropout: float = 0.1, norm_first: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.causal = causal

    def forward(self, input_ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1]) if self.causal else None
        return self.head(self.encoder(self.embed(input_ids), mask, is_causal=self.causal))


class Seq2Seq(nn.Module):
    """torch's own nn.Transformer, batch second."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, 32, dropout)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        read, written = self.embed(input_ids).transpose(0, 1), self.embed(decoder_input_ids).transpose(0, 1)
        mask = self.transformer.generate_square_subsequent_mask(written.shape[0])
        return self.head(self.transformer(read, written, tgt_mask=mask).transpose(0, 1))


class Attention(nn.Module):
    """nn.MultiheadAttention that returns its weights, and reads keys and values of other widths."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(12, WIDTH)
        self.own = nn.MultiheadAttention(WIDTH, HEADS, 0.1, batch_first=True)
        self.other = nn.MultiheadAttention(WIDTH, HEADS, kdim=12, vdim=12, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        x = self.read(features)
        y, weights = self.own(x, x, x)
        z, _ = self.other(y, features, features, need_weights=False)
        return self.head((y + z + weights.mean()).mean(1))


class Recurrent(nn.Module):
    """Two recurrent layers over embedded tokens."""

    def __init__(self, kind: str = "LSTM", dropout: float = 0.0, bidirectional: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.recurrent = getattr(nn, kind)(WIDTH, 12, 2, batch_first=True, dropout=dropout, bidirectional=bidirectional)
        self.head = nn.Linear(12 * (1 + bidirectional), CLASSES)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embed(input_ids))[0][:, -1])


def drop_path(x: Tensor, p: float, training: bool) -> Tensor:
    """Stochastic depth per sample, as timm has it."""
    if not training or not p:
        return x
    mask = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(1 - p)
    return x * mask.div_(1 - p)


class StochasticDepth(nn.Module):
    """Residual blocks, each left out for some samples."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, 1, 1) for _ in range(3))
        self.head, self.p = nn.Linear(8, CLASSES), p

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for block in self.blocks:
            x = x + drop_path(F.gelu(block(x)), self.p, self.training)
        return self.head(x.mean((2, 3)))


class Noise(nn.Module):
    """A variational bottleneck, noise of several kinds, and activations that draw."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.head = nn.Linear(12, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.alpha, self.drop = nn.AlphaDropout(0.2), nn.Dropout1d(0.2)

    def forward(self, features: Tensor) -> Tensor:
        mean, log_variance = self.encode(features).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        z = F.rrelu(self.decode(z), training=self.training)
        z = z * (1 + 0.1 * torch.rand(z.shape[0], 1, 1, dtype=z.dtype)) + torch.normal(0.0, 0.1, z.shape, dtype=z.dtype)
        z = self.drop(self.alpha(z)) + F.gumbel_softmax(z, dim=-1)
        return self.head(F.dropout(z, 0.1, self.training).mean(1))


class Normalised(nn.Module):
    """Weights with a parametrization."""

    def __init__(self, kind: str = "weight_norm") -> None:
        super().__init__()
        wrap = getattr(parametrizations, kind)
        self.body = nn.Sequential(
            wrap(nn.Linear(12, WIDTH)), nn.Tanh(), wrap(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
        )

    def forward(self, features: Tensor) -> Tensor:
        return self.body(features.mean(1))


class Bags(nn.Module):
    """nn.EmbeddingBag."""

    def __init__(self, mode: str = "mean") -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(TOKENS, WIDTH, mode=mode)
        self.hidden, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.hidden(self.bag(input_ids)).relu())


class Experts(nn.Module):
    """A tensor of all experts' matrices, of which each token takes one by its index."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.route = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, WIDTH, 32) * 0.1)
        self.down = nn.Parameter(torch.randn(4, 32, WIDTH) * 0.1)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        weights, chosen = self.route(x).softmax(-1).max(-1)
        hidden = torch.einsum("bsd,bsdf->bsf", x, self.up[chosen]).relu()
        every = torch.einsum("bsd,edf->besf", x, self.up).mean(1)
        x = x + weights[..., None] * torch.einsum("bsf,bsfd->bsd", hidden + every, self.down[chosen])
        return self.head(x)


class Convolutions(nn.Module):
    """A small U-Net: convolutions down, transposed up, a skip across; a label for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.up2, self.up1 = nn.ConvTranspose2d(16, 8, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.norm, self.head = nn.GroupNorm(2, 8), nn.Conv2d(8, CLASSES, 1)

    def forward(self, image: Tensor) -> Tensor:
        one = self.down1(image).relu()
        two = self.norm(self.up2(self.down2(one).relu()))
        return self.head(self.up1(torch.cat([one, two], 1))).permute(0, 2, 3, 1)


class TakesDict(nn.Module):
    """Its forward takes one dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(12, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.head((self.embed(batch["input_ids"]) + self.read(batch["features"])).relu().mean(1))


class Stepwise(nn.Module):
    """A module that cannot be captured in the middle, for it branches on values."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.read, self.branch, self.head = nn.Linear(12, WIDTH), Branch(), nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.branch(self.read(features)).mean(1))


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if float(x.detach().abs().sum()) > 0 else x


class AllBranches(nn.Module):
    """A whole model that cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(12, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        x = self.first(features)
        for _ in range(1 + int(bool((x > -1e9).all()))):
            x = self.second(x).tanh()
        return self.head(x.mean(1))
