"""T-RoPE in plain attention: a shop where the season of the request decides what is bought next.

    python examples/dropin.py

Every user has bought items of four seasons at random times over six years. The season of the next purchase decides what
is bought. Index RoPE cannot know that moment. T-RoPE's last query looks from it (`t_now`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trope import IndexRoPE, TRoPE, frequency_parameters

ITEMS, WIDTH, HEADS, LENGTH = 4, 64, 2, 16
YEAR, FIRST, YEARS = 31_556_952, 1_388_534_400, 6  # from 2014 on


class Attention(nn.Module):
    """One causal attention layer; the rotary encoding is the only part that knows about order or time."""

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, ITEMS)
        self.rope = rope

    def forward(self, items: Tensor, times: Tensor, t_now: Tensor) -> Tensor:
        B, L = items.shape
        q, k, v = self.qkv(self.items(items)).view(B, L, 3, HEADS, WIDTH // HEADS).unbind(2)
        q, k = self.rope(q, k, times, t_now=t_now)  # <- the one line
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, L, WIDTH)[:, -1])


def season(times: Tensor) -> Tensor:
    return times % YEAR * ITEMS // YEAR


def draw(batch: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Histories, the moment of the next purchase, and what is bought then."""
    times = torch.randint(FIRST, FIRST + YEARS * YEAR, (batch, LENGTH + 1), generator=rng).sort(dim=1).values
    return season(times[:, :-1]), times[:, :-1], times[:, -1], season(times[:, -1])


def accuracy(model: nn.Module, rng: torch.Generator) -> float:
    items, times, t_now, target = draw(2000, rng)
    with torch.no_grad():
        return (model(items, times, t_now).argmax(1) == target).float().mean().item()


def train(rope: nn.Module, steps: int = 200) -> float:
    """Accuracy on users never seen, after so many steps."""
    rng = torch.Generator().manual_seed(0)
    model = Attention(rope)
    slow = list(frequency_parameters(model))  # their own group: no weight decay on frequencies
    rest = [p for p in model.parameters() if all(p is not s for s in slow)]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": slow, "weight_decay": 0.0}], lr=5e-3)
    for _ in range(steps):
        items, times, t_now, target = draw(128, rng)
        loss = F.cross_entropy(model(items, times, t_now), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return accuracy(model, rng)


if __name__ == "__main__":
    for name, rope in (
        ("index RoPE", IndexRoPE(WIDTH // HEADS)),
        ("T-RoPE", TRoPE(WIDTH // HEADS, time_span=(FIRST, FIRST + YEARS * YEAR))),
        ("T-RoPE, calendar bank", TRoPE(WIDTH // HEADS, time_span=(FIRST, FIRST + YEARS * YEAR), bank="calendar")),
    ):
        torch.manual_seed(0)
        print(f"{name:22s} {train(rope):6.1%} of the next purchases right (chance {1 / ITEMS:.0%})", flush=True)
