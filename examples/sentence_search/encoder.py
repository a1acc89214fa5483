"""all-MiniLM-L6-v2 as cudnn_core graphs. Imported by the demo's ``__main__`` and its tests.

A BERT layer is five graphs: the projection to q, k and v (matmul + bias), attention (sdpa with a padding mask), two
projections that add the residual (matmul + bias + add), the first half of the feed-forward block (matmul + bias + gelu);
and layernorm. Sizes are the same in every layer, so that each distinct graph is planned once and run with the weights of
all layers: the graph is the program, the buffers are its arguments.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import normalize

import cudnn_core

MAX_TOKENS = 256  # of the model's sentence_bert_config.json


class Stage:
    """One distinct graph with its plan.

    ``build`` gets the graph and a tensor of it for each of the example buffers ``inputs``, and returns the output tensor.
    Calling the stage with buffers of the same names and layouts runs the plan and returns the output buffer.
    """

    def __init__(
        self, title: str, inputs: Mapping[str, torch.Tensor], build: Callable[..., Any], device: str | int
    ) -> None:
        example = next(iter(inputs.values()))
        self.title = title
        self.graph = cudnn_core.Graph(
            name=title, io_data_type=example.dtype, intermediate_data_type="float32", compute_data_type="float32"
        )
        self.tensors = {name: self.graph.tensor_like(buffer, name=name) for name, buffer in inputs.items()}
        self.output = build(self.graph, **self.tensors).set_output(True).set_data_type(example.dtype)
        start = time.perf_counter()
        self.plan = self.graph.plan(device=device)
        self.planning = time.perf_counter() - start
        self.target = example.device
        self.dtype = example.dtype
        self.workspace = torch.empty(self.plan.workspace_size, dtype=torch.uint8, device=self.target)
        self.runs = 0
        self.seconds = 0.0

    def __call__(self, **buffers: torch.Tensor) -> torch.Tensor:
        out = torch.empty_strided(self.output.get_dim(), self.output.get_stride(), dtype=self.dtype, device=self.target)
        operands = {self.tensors[name]: buffer for name, buffer in buffers.items()}
        start = time.perf_counter()
        self.plan.execute({**operands, self.output: out}, self.workspace)
        if self.target.type == "cuda":
            torch.cuda.synchronize(self.target)  # for the timing alone
        self.seconds += time.perf_counter() - start
        self.runs += 1
        return out


class Encoder:
    """The model: ``encode(ids, lengths)`` gives unit vectors. ``stages`` are the distinct graphs in order of first use."""

    def __init__(self, model_dir: Path, device: torch.device, dtype: torch.dtype) -> None:
        from safetensors.torch import load_file

        self.config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        self.device, self.dtype = device, dtype
        weights = load_file(model_dir / "model.safetensors")
        self.weights = {name: value.to(device, dtype) for name, value in weights.items() if value.is_floating_point()}
        for layer in range(self.config["num_hidden_layers"]):  # q, k and v in one matmul
            for kind in ("weight", "bias"):
                parts = [
                    self.weights[f"encoder.layer.{layer}.attention.self.{x}.{kind}"] for x in ("query", "key", "value")
                ]
                self.weights[f"encoder.layer.{layer}.attention.qkv.{kind}"] = torch.cat(parts)
        self.stages: dict[str, Stage] = {}
        self._shape: tuple[int, ...] = ()

    def encode(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """``ids`` [batch, tokens] padded on the right, ``lengths`` [batch] -> [batch, hidden], mean-pooled, unit length."""
        if ids.shape != self._shape:  # plans are for fixed sizes
            self.stages, self._shape = {}, ids.shape
        ids, lengths = ids.to(self.device), lengths.to(self.device)
        batch, tokens = ids.shape
        heads = self.config["num_attention_heads"]
        hidden = self.config["hidden_size"]
        width = hidden // heads
        w = self.weights

        position = w["embeddings.position_embeddings.weight"][:tokens] + w["embeddings.token_type_embeddings.weight"][0]
        word = w["embeddings.word_embeddings.weight"][ids]
        x = self._run("embedding sum", _add, a=word, b=position.unsqueeze(0)).view(1, batch * tokens, hidden)
        x = self._norm(x, "embeddings.LayerNorm")

        seq_len = lengths.to(torch.int32).view(batch, 1, 1, 1)
        for layer in range(self.config["num_hidden_layers"]):
            at = f"encoder.layer.{layer}"
            qkv = self._run("q, k, v projection", _linear, x=x, **self._linear(f"{at}.attention.qkv"))
            # [1, batch * tokens, 3 * hidden] seen as three tensors [batch, heads, tokens, width]: strides, no copies
            q, k, v = qkv.view(batch, tokens, 3, heads, width).permute(2, 0, 3, 1, 4)
            mixed = self._run("attention", _attention, q=q, k=k, v=v, seq_len_q=seq_len, seq_len_kv=seq_len)
            mixed = mixed.permute(0, 2, 1, 3).view(1, batch * tokens, hidden)
            x = self._run(
                "projection + residual",
                _linear_add,
                x=mixed,
                **self._linear(f"{at}.attention.output.dense"),
                residual=x,
            )
            x = self._norm(x, f"{at}.attention.output.LayerNorm")
            inner = self._run("feed-forward up", _linear_gelu, x=x, **self._linear(f"{at}.intermediate.dense"))
            x = self._run(
                "feed-forward down + residual", _linear_add, x=inner, **self._linear(f"{at}.output.dense"), residual=x
            )
            x = self._norm(x, f"{at}.output.LayerNorm")
        return pool(x.view(batch, tokens, hidden), lengths)

    def _run(self, title: str, build: Callable[..., Any], **buffers: torch.Tensor) -> torch.Tensor:
        stage = self.stages.get(title)
        if stage is None:
            device = "cpu" if self.device.type == "cpu" else (self.device.index or 0)
            stage = self.stages[title] = Stage(title, buffers, build, device)
        return stage(**buffers)

    def _linear(self, name: str) -> dict[str, torch.Tensor]:
        """A Linear's weight [out, in] as the B operand [1, in, out], K-major, and its bias [1, 1, out]."""
        return {
            "weight": self.weights[f"{name}.weight"].t().unsqueeze(0),
            "bias": self.weights[f"{name}.bias"].view(1, 1, -1),
        }

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale, bias = (self.weights[f"{name}.{kind}"].view(1, 1, -1) for kind in ("weight", "bias"))
        return self._run("layernorm", self._layernorm, x=x, scale=scale, bias=bias)

    def _layernorm(self, g: Any, x: Any, scale: Any, bias: Any) -> Any:
        return g.layernorm(
            norm_forward_phase=cudnn_core.norm_forward_phase.INFERENCE,
            input=x,
            scale=scale,
            bias=bias,
            epsilon=self.config["layer_norm_eps"],
        )[0]


def _add(g: Any, a: Any, b: Any) -> Any:
    return g.add(a=a, b=b)


def _linear(g: Any, x: Any, weight: Any, bias: Any) -> Any:
    return g.bias(input=g.matmul(A=x, B=weight), bias=bias)


def _linear_gelu(g: Any, x: Any, weight: Any, bias: Any) -> Any:
    return g.gelu(input=_linear(g, x, weight, bias))


def _linear_add(g: Any, x: Any, weight: Any, bias: Any, residual: Any) -> Any:
    return g.add(a=_linear(g, x, weight, bias), b=residual)


def _attention(g: Any, q: Any, k: Any, v: Any, seq_len_q: Any, seq_len_kv: Any) -> Any:
    batch, heads, tokens, width = q.get_dim()
    out, _ = g.sdpa(
        q=q,
        k=k,
        v=v,
        is_inference=True,
        attn_scale=width**-0.5,
        use_padding_mask=True,
        seq_len_q=seq_len_q,
        seq_len_kv=seq_len_kv,
    )
    # stored as [batch, tokens, heads * width], so that the next matmul reads it as it is
    return out.set_dim([batch, heads, tokens, width]).set_stride([tokens * heads * width, width, heads * width, 1])


def pool(states: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens that are not padding, scaled to unit length, in float32."""
    mask = torch.arange(states.shape[1], device=states.device) < lengths[:, None]
    states = states.float().masked_fill(~mask[..., None], 0.0)  # outputs at padded queries are of no meaning
    return normalize(states.sum(1) / lengths[:, None], dim=-1)


def tokenize(model_dir: Path, sentences: Iterable[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [batch, tokens], padded to a multiple of 8, and the lengths [batch]."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding(pad_to_multiple_of=8)
    encoded = tokenizer.encode_batch(list(sentences))
    ids = torch.tensor([item.ids for item in encoded])
    return ids, torch.tensor([sum(item.attention_mask) for item in encoded])


def reference(model_dir: Path, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The same embeddings from transformers' own BertModel, on the CPU in float32."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.BertModel.from_pretrained(
        model_dir, add_pooling_layer=False, attn_implementation="eager", local_files_only=True
    ).eval()
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    with torch.inference_mode():
        states = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        return pool(states, lengths)


def cosine_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """1 - cos between rows, in float64."""
    a, b = normalize(a.double(), dim=-1), normalize(b.double(), dim=-1)
    return 1.0 - (a * b).sum(-1)
