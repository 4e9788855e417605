"""T-RoPE in a Hugging Face model: a small Llama, randomly initialised, whose rotary embedding becomes T-RoPE.

    pip install transformers; python examples/huggingface.py

Llama gives one cos and sin to every layer and rotates query and key alike. T-RoPE rotates them differently and learns
in every layer. So this example makes Llama's own rotary the identity, and each layer rotates inside its attention
function, which Transformers lets us register by name. `times` reaches it as a keyword of the model's forward.

`save_pretrained` and `from_pretrained` keep T-RoPE. A plain Llama refuses the saved folder, because its config asks for
a rotary that only this file knows. `generate` takes `times` of the events so far and a moment for each new event.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from trope import TRoPE, frequency_parameters

ITEMS, LENGTH, DAY = 50, 24, 86_400


class LlamaTRoPEConfig(LlamaConfig):
    """A Llama's config, with the time span of the training data in `rope_parameters`."""

    model_type = "llama-trope"

    def _validate_trope_rope_parameters(self, rope_parameters: dict[str, Any], ignore_keys: object = None) -> None:
        if len(rope_parameters.get("time_span", ())) != 2:
            raise ValueError(f"rope_parameters must have a time_span (first, last), got {rope_parameters}")


def no_rotary(config: LlamaConfig, *_: object, **__: object) -> tuple[Tensor, float]:
    """Llama's own rotary with frequencies of zero, the identity; a plain Llama with it would rotate nothing."""
    if not isinstance(config, LlamaTRoPEConfig):
        raise ValueError("this model was saved with T-RoPE; load it with LlamaTRoPEForCausalLM.from_pretrained")
    return torch.zeros(config.head_dim // 2), 1.0


def attention_with_trope(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    times: Tensor | None = None, t_now: Tensor | None = None, **kwargs: object,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Rotate by time, then attend as usual. Transformers passes [B, H, L, D]; T-RoPE takes [B, L, H, D]."""
    if times is None or times.shape[1] != key.shape[2]:
        found = None if times is None else tuple(times.shape)
        raise ValueError(f"times must have one entry for each of {key.shape[2]} events, cached ones too, got {found}")
    new = query.shape[2]
    if new == key.shape[2]:
        query, key = (x.transpose(1, 2) for x in (query, key))
        query, key = (x.transpose(1, 2) for x in module.trope(query, key, times, t_now=t_now))
    else:  # the cache holds keys as they were before the rotation, so only the query is short
        tables = module.trope.cos_sin(times, t_now=t_now, dtype=query.dtype)
        query, _ = apply_rotary_pos_emb(query, query, tables.cos_q[:, -new:], tables.sin_q[:, -new:])
        _, key = apply_rotary_pos_emb(key, key, tables.cos_k, tables.sin_k)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


ROPE_INIT_FUNCTIONS["trope"] = no_rotary
AttentionInterface.register("trope", attention_with_trope)
AttentionMaskInterface.register("trope", sdpa_mask)  # without it, Transformers would drop the mask of padded events


class LlamaTRoPEForCausalLM(LlamaForCausalLM):
    """A Llama whose layers rotate by time. `layout="halves"` is Llama's own pairing of dims."""

    config_class = LlamaTRoPEConfig
    _keep_in_fp32_modules_strict = ("trope",)  # a coefficient in bf16 is another frequency

    def __init__(self, config: LlamaTRoPEConfig) -> None:
        config._attn_implementation = "trope"
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.trope = TRoPE(
                config.head_dim, layout="halves", time_span=config.rope_parameters["time_span"]
            )

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> "LlamaTRoPEForCausalLM":
        model, loaded = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        missing = [key for key in loaded["missing_keys"] if ".trope." in key]
        if missing:
            raise ValueError(
                f"the checkpoint was saved without T-RoPE: it lacks {missing[0]} and {len(missing) - 1} more"
            )
        first, last = model.config.rope_parameters["time_span"]
        for module in model.modules():
            if isinstance(module, TRoPE):
                # Transformers casts whole seconds with dtype=bfloat16, and fills no buffer outside the checkpoint.
                module.t0, module.span = (
                    torch.tensor(x, device=model.device) for x in ((first + last) // 2, last - first)
                )
                module.set_bank(module.beta_min, module.beta_max)
        return model

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: Any = None, inputs_embeds: Tensor | None = None, *,
        times: Tensor | None = None, t_now: Tensor | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """As Llama's. times: [B, L] Unix seconds of all events, cached ones too. t_now: [B] the next event's moment.

        Events are padded on the left, masked by `attention_mask`, with the first event's time.
        """
        known = (input_ids, attention_mask, position_ids, past_key_values, inputs_embeds)
        return super().forward(*known, times=times, t_now=t_now, **kwargs)

    def prepare_inputs_for_generation(
        self, *args: Any, times: Tensor | None = None, t_now: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Each new event is predicted for its own moment: `generate(items, times=..., t_now=moments)`, [B, new]."""
        if times is None or t_now is None or t_now.dim() != 2 or t_now.shape[1] == 0:
            raise ValueError("generate needs times [B, L] and t_now [B, new events], a moment for each event to come")
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        return {**inputs, "times": times, "t_now": t_now[:, 0]}

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        """The new event happens at the moment that it was predicted for."""
        times, t_now = model_kwargs["times"], model_kwargs["t_now"]
        model_kwargs["times"], model_kwargs["t_now"] = torch.cat((times, t_now[:, :1]), dim=1), t_now[:, 1:]
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)


def draw(batch: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Purchases with a weekly habit: what is bought depends on the weekday, not on what came before."""
    gaps = torch.randint(DAY // 2, 5 * DAY, (batch, LENGTH), generator=rng)
    times = 1_500_000_000 + torch.randint(0, 7 * DAY, (batch, 1), generator=rng) + gaps.cumsum(1)
    return times // DAY % 7, times


def train(steps: int = 600) -> tuple[list[float], LlamaTRoPEForCausalLM]:
    """Losses while learning to predict the next purchase."""
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(0)
    config = LlamaTRoPEConfig(
        vocab_size=ITEMS, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "trope", "time_span": [1_500_000_000, 1_500_000_000 + 70 * DAY]},
    )  # fmt: skip
    model = LlamaTRoPEForCausalLM(config)
    frequencies = list(frequency_parameters(model))
    rest = [p for p in model.parameters() if all(p is not f for f in frequencies)]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": frequencies, "weight_decay": 0.0}], lr=3e-3)
    losses = []
    for _ in range(steps):
        items, times = draw(64, rng)
        loss = model(input_ids=items, labels=items, times=times, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


if __name__ == "__main__":
    losses, model = train()
    print(f"loss {losses[0]:.2f} at the start, {losses[-1]:.2f} after {len(losses)} steps (guessing weekdays: 1.95)")
    moved = max(p.abs().max().item() for p in frequency_parameters(model))
    print(f"the frequencies learned: the largest delta is {moved:.3f}")
    items, times = draw(1, torch.Generator().manual_seed(1))
    moments = times[:, -1:] + DAY * torch.arange(1, 8)  # one purchase a day for a week
    bought = model.generate(items, times=times, t_now=moments, max_new_tokens=7, do_sample=False)[0, -7:]
    print(f"weekdays of the next purchases: {(moments[0] // DAY % 7).tolist()}, generated: {bought.tolist()}")
