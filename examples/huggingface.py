"""T-RoPE in a Hugging Face model: a small Llama, randomly initialised, whose rotary embedding becomes T-RoPE.

    pip install transformers; python examples/huggingface.py

Llama gives one cos and sin to every layer and rotates query and key alike. T-RoPE rotates them differently and learns
in every layer. So this example makes Llama's own rotary the identity, and each layer rotates inside its attention
function, which Transformers lets us register by name. `times` reaches it as a keyword of the model's forward.
"""

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from trope import TRoPE, frequency_parameters

ITEMS, LENGTH, DAY = 50, 24, 86_400


class NoRotary(nn.Module):
    """An identity rotation: cos is 1, sin is 0."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        shape = (*position_ids.shape, self.head_dim)
        return x.new_ones(shape), x.new_zeros(shape)


def attention_with_trope(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    times: Tensor, t_now: Tensor | None = None, **kwargs: object,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Rotate by time, then attend as usual. Transformers passes [B, H, L, D]; T-RoPE takes [B, L, H, D]."""
    query, key = module.trope(query.transpose(1, 2), key.transpose(1, 2), times, t_now=t_now)
    return sdpa_attention_forward(module, query.transpose(1, 2), key.transpose(1, 2), value, attention_mask, **kwargs)


def llama_with_trope(config: LlamaConfig, time_span: tuple[int, int]) -> LlamaForCausalLM:
    """A Llama whose layers rotate by time. `layout="halves"` is Llama's own pairing of dims."""
    AttentionInterface.register("trope", attention_with_trope)
    config._attn_implementation = "trope"
    model = LlamaForCausalLM(config)
    model.model.rotary_emb = NoRotary(config.head_dim)
    for layer in model.model.layers:
        layer.self_attn.trope = TRoPE(config.head_dim, layout="halves", time_span=time_span)
    return model


def draw(batch: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Purchases with a weekly habit: what is bought depends on the weekday, not on what came before."""
    gaps = torch.randint(DAY // 2, 5 * DAY, (batch, LENGTH), generator=rng)
    times = 1_500_000_000 + torch.randint(0, 7 * DAY, (batch, 1), generator=rng) + gaps.cumsum(1)
    return times // DAY % 7, times


def train(steps: int = 300) -> tuple[list[float], LlamaForCausalLM]:
    """Losses while learning to predict the next purchase."""
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(0)
    config = LlamaConfig(
        vocab_size=ITEMS, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, use_cache=False,
    )  # fmt: skip
    model = llama_with_trope(config, time_span=(1_500_000_000, 1_500_000_000 + 70 * DAY))
    frequencies = list(frequency_parameters(model))
    rest = [p for p in model.parameters() if all(p is not f for f in frequencies)]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": frequencies, "weight_decay": 0.0}], lr=3e-3)
    losses = []
    for _ in range(steps):
        items, times = draw(64, rng)
        loss = model(input_ids=items, labels=items, times=times).loss
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
