"""T-RoPE, the paper: queries and keys are rotated by *when* events happened instead of by their index.

Notable:
- phases are exact: float64 turns, whole turns dropped, then float32 (docs/method.md, "Exact phases");
- `conditioning="span"` learns frequencies in coordinates the optimiser can move in (docs/method.md, "Conditioning");
- the query is rotated at the time of the *next* event, the last one at `t_now` (shift.py);
- the key's conjugate rotation is a sign on its coefficient, so one kernel serves every variant.

Shape letters: B batch, L positions, T jagged tokens, H heads, D head dim, P planes, C coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trope.kernels import Backend
from trope.kernels.silu_rotate import Turns
from trope.rotary import checks
from trope.rotary.banks import calendar_bank, frequency_bank
from trope.rotary.base import Layout, Rotary, event_index, float64
from trope.rotary.shift import shifted_times

# Without a given time span T-RoPE is conditioned for events from 2000 to 2030: wide enough for any real log, so that
# one optimiser step moves a phase by O(lr) anywhere in it. A log's own span lets frequencies adapt faster.
NEUTRAL_SPAN = (946_684_800, 1_893_456_000)
NEUTRAL_INDEX_SPAN = (0, 10_000)  # for position="index": what index RoPE's own bank resolves
STEP = 8.0  # one unit of delta turns a plane by this many radians over the whole time span


class TRoPE(Rotary):
    """Time-aware rotary position embedding: queries turn by +alpha_q * t / beta, keys by -alpha_k * t / beta.

    The score of plane d then turns by (alpha_q * t_query + alpha_k * t_key) / beta_d (eq. attention), which knows the
    calendar, not only the gap. `TRoPE(head_dim)` is the method; each of its five parts has a switch.

    Args:
        head_dim: dims per head, D.
        rotary_dim: how many of them rotate, even; the rest passes through. All by default.
        time_span: (first, last) time of the training data, Unix seconds; NEUTRAL_SPAN by default. In the checkpoint.
        position: rotate by "times", or by "index" (part 1 off).
        learnable: learn the coefficients (part 2); False freezes them as they were drawn.
        multiscale: a geometric bank of beta (part 3); False gives every plane their geometric mean.
        shifted: the query looks from the next event's time, the last from `t_now` (part 4); False: from its own.
        conjugate: the key turns the other way (part 5, the non-stationary key).
        rotate_query, rotate_key: rotate only one side, for ablations.
        share_alpha: one coefficient for query and key, as Theorems 1 and 2 assume. With independent ones, `conjugate`
            only renames alpha_k to -alpha_k: the same family of functions.
        alpha_init: coefficients start from N(0, 1) as in the paper, or at "ones" (plain timestamp RoPE).
        bank: "geometric"; or "calendar": the first half of the planes stationary (shared coefficient, no conjugate) on
            the geometric bank up to the time span, the second half absolute on frozen calendar harmonics.
        beta_min, beta_max: ends of the geometric bank, seconds (for position="index": 1 and 1e4 steps).
        conditioning: "span" learns delta in alpha = alpha0 + 8 * delta * beta / T, about the middle of the time span;
            "paper" learns alpha itself on uncentred times.
        phase: "exact", or "fp32" for the paper's arithmetic.
        layout: a plane is (x[2p], x[2p + 1]) if "interleaved", as in the paper; (x[p], x[P + p]) if "halves".
        require_t_now: refuse calls without `t_now`; switch it on for serving.
        backend: "auto", "torch" or "triton".
        check_values: read the times to refuse bad and unsorted ones. On a GPU that waits for the device a few times a
            call; switch it off where the data have been checked before.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        rotary_dim: int | None = None,
        time_span: tuple[int, int] | None = None,
        position: Literal["times", "index"] = "times",
        learnable: bool = True,
        multiscale: bool = True,
        shifted: bool = True,
        conjugate: bool = True,
        rotate_query: bool = True,
        rotate_key: bool = True,
        share_alpha: bool = False,
        alpha_init: Literal["normal", "ones"] = "normal",
        bank: Literal["geometric", "calendar"] = "geometric",
        beta_min: float | None = None,
        beta_max: float | None = None,
        conditioning: Literal["span", "paper"] = "span",
        phase: Literal["exact", "fp32"] = "exact",
        layout: Layout = "interleaved",
        require_t_now: bool = False,
        backend: Backend = "auto",
        check_values: bool = True,
    ) -> None:
        super().__init__(head_dim, rotary_dim, layout, backend, check_values)
        checks.check_choice("position", position, ("times", "index"))
        checks.check_choice("bank", bank, ("geometric", "calendar"))
        checks.check_choice("alpha_init", alpha_init, ("normal", "ones"))
        checks.check_choice("conditioning", conditioning, ("span", "paper"))
        checks.check_choice("phase", phase, ("exact", "fp32"))
        by_index = position == "index"
        if bank == "calendar" and (by_index or not multiscale or self.planes < 2):
            raise ValueError('bank="calendar" needs times, multiscale=True and at least two planes')
        self.position, self.bank, self.conditioning, self.phase = position, bank, conditioning, phase
        self.learnable, self.multiscale, self.shifted, self.conjugate = learnable, multiscale, shifted, conjugate
        self.rotate_query, self.rotate_key, self.require_t_now = rotate_query, rotate_key, require_t_now
        self.beta_min = (1.0 if by_index else 1e2) if beta_min is None else beta_min
        self.beta_max = (1e4 if by_index else 1e8) if beta_max is None else beta_max
        # Absolute calendar planes are frozen: only the first `learned` planes have a coefficient.
        self.learned = self.planes // 2 if bank == "calendar" else self.planes
        self._linear_cache: tuple[list[Any], tuple[Tensor, ...]] | None = None
        self.shared = share_alpha or bank == "calendar"

        if conditioning == "span":
            neutral = NEUTRAL_INDEX_SPAN if by_index else NEUTRAL_SPAN
            first, last = checks.check_span(neutral if time_span is None else time_span)
            self.register_buffer("t0", torch.tensor((first + last) // 2))
            self.register_buffer("span", torch.tensor(last - first))
        elif time_span is not None:
            raise ValueError('conditioning="paper" uses times as they are and takes no time_span; leave it out')
        self._keep_constants()
        for side, present in (("q", rotate_query or self.shared), ("k", rotate_key and not self.shared)):
            if present:
                alpha = torch.ones(self.learned) if alpha_init == "ones" else torch.randn(self.learned)
                self._add_coefficients(side, alpha)

    def _add_coefficients(self, side: str, alpha: Tensor) -> None:
        if self.conditioning == "paper" and self.learnable:
            self.register_parameter(f"alpha_{side}", nn.Parameter(alpha))
            return
        self.register_buffer(f"alpha0_{side}", alpha)
        if self.learnable:
            self.register_parameter(f"delta_{side}", nn.Parameter(torch.zeros_like(alpha)))

    def _form_constants(self) -> Tensor:
        """beta, 2 pi beta and d alpha / d delta of every plane, float64 [3, P]: constants, so that no exporter rounds
        a literal 2 pi to float32 and no step divides again."""
        span = math.inf
        # Without values (device meta) there is no span to read; loading a checkpoint forms the bank again.
        if self.conditioning == "span" and not self.get_buffer("span").is_meta:
            span = float(self.get_buffer("span").item())
        upper = self.beta_max
        if self.bank == "calendar":
            upper = max(self.beta_min, min(upper, span))
        betas = frequency_bank(self.learned, self.beta_min, upper)
        if not self.multiscale:
            betas = torch.full_like(betas, math.sqrt(self.beta_min * self.beta_max))
        if self.bank == "calendar":
            betas = torch.cat((betas, calendar_bank(self.planes - self.learned)))
        # The change of coordinates: one unit of delta turns time t by STEP * (t - t0) / T, whatever beta is.
        return torch.stack((betas, 2 * math.pi * betas, STEP * betas / span))

    def set_bank(self, beta_min: float, beta_max: float) -> None:
        """Another range of the frequency bank, seconds."""
        self.beta_min, self.beta_max = beta_min, beta_max
        self._keep_constants()

    @property
    def betas(self) -> Tensor:
        """The frequency bank: beta of every plane in seconds, float64 [P]."""
        return self._constants()[0]

    def alpha(self, side: Literal["q", "k"]) -> Tensor:
        """The coefficients in effect, float64 [P]: alpha_q or alpha_k of eq. learnable, zeros if that side is off."""
        betas = self.betas
        if not (self.rotate_query if side == "q" else self.rotate_key):
            return torch.zeros_like(betas)
        alpha = self._own_alpha("q" if self.shared else side)
        if self.learned < self.planes:
            return torch.cat((alpha, torch.ones_like(betas[self.learned :])))
        return alpha

    def _own_alpha(self, side: str) -> Tensor:
        """The coefficients of one side that have values of their own, float64."""
        if self.conditioning == "paper" and self.learnable:
            return float64(self._coefficients("alpha", side))
        alpha = float64(self.get_buffer(f"alpha0_{side}"))
        if not self.learnable:
            return alpha
        return alpha + self._constants()[2][: len(alpha)] * float64(self._coefficients("delta", side))

    def _coefficients(self, name: str, side: str) -> Tensor:
        """A learned parameter; FSDP and torch.func put plain tensors in its place, which get_parameter refuses."""
        coefficients: Tensor = getattr(self, f"{name}_{side}")
        return coefficients

    def _signed_alpha(self) -> tuple[Tensor, Tensor]:
        """Query and key coefficients with the key's direction: conjugate planes turn by the negative angle."""
        alpha_q, alpha_k = self.alpha("q"), self.alpha("k")
        if not self.conjugate:
            return alpha_q, alpha_k
        if self.bank == "geometric":
            return alpha_q, -alpha_k
        return alpha_q, torch.cat((alpha_k[: self.learned], -alpha_k[self.learned :]))

    def frequencies(self) -> tuple[Tensor, Tensor]:
        """alpha / (2 pi beta) of the query planes and, signed, of the key planes (eq. learnable): turns per second,
        float64 [1, P]."""
        alpha_q, alpha_k = self._signed_alpha()
        periods = self._constants()[1]
        return (alpha_q / periods)[None], (alpha_k / periods)[None]

    def turns(self) -> Turns:
        """Frequencies are linear in the coefficients; where all of them are learned, kernels take them apart."""
        if not self.is_linear:
            return super().turns()
        name = "alpha" if self.conditioning == "paper" else "delta"
        deltas_q = self._coefficients(name, "q")
        deltas_k = deltas_q if self.shared else self._coefficients(name, "k")
        freqs_q, freqs_k, slopes_q, slopes_k, origin = self._linear()
        return Turns(freqs_q, freqs_k, slopes_q, slopes_k, deltas_q, deltas_k, origin)

    @property
    def is_linear(self) -> bool:
        """Whether every frequency is a constant plus a constant times its own coefficient, in both directions."""
        is_learned = self.learnable and self.bank == "geometric" and self.rotate_query and self.rotate_key
        return is_learned and self.phase == "exact" and self.get_buffer("_constant_bits").device.type != "mps"

    def _linear(self) -> tuple[Tensor, ...]:
        """Frequencies of query and key where the coefficients are 0, what a unit of one adds, float64 [1, P]; and the
        origin, 1970 where there is no conditioning."""
        buffers = [x for x in self._buffers.values() if x is not None]
        # A traced tensor has no address, one of inference mode no version.
        if torch.compiler.is_compiling() or any(x.is_inference() for x in buffers):
            return self._form_linear()
        # They change when a checkpoint is loaded or the module moves; in between they are not worth a dozen launches.
        key = [(x.data_ptr(), x._version, x.device) for x in buffers]
        if self._linear_cache is None or self._linear_cache[0] != key:
            with torch.inference_mode(False), torch.no_grad():  # kept beyond whoever asks first
                self._linear_cache = (key, self._form_linear())
        return self._linear_cache[1]

    def _form_linear(self) -> tuple[Tensor, ...]:
        _, periods, gain = self._constants()
        bases, slopes = [], []
        for side, sign in (("q", 1.0), ("k", -1.0 if self.conjugate else 1.0)):
            base = torch.zeros_like(periods)
            if self.conditioning == "span":
                base = self.get_buffer(f"alpha0_{'q' if self.shared else side}").double() / periods
            slope = 1 / periods if self.conditioning == "paper" else gain / periods
            bases.append((sign * base)[None])
            slopes.append((sign * slope)[None])
        origin = self._buffers.get("t0")
        if origin is None:
            origin = torch.zeros_like(self.get_buffer("_constant_bits")[0, 0])
        return (*bases, *slopes, origin)

    def paper_phase(self) -> tuple[Tensor, Tensor, Tensor] | None:
        if self.phase == "exact":
            return None
        device = self.get_buffer("_constant_bits").device
        alpha_q, alpha_k = self._signed_alpha()
        return alpha_q.float()[None].to(device), alpha_k.float()[None].to(device), self.betas.float().to(device)

    def coordinates(
        self, shape: torch.Size, times: Tensor | None, lengths: Tensor | None, t_now: Tensor | None,
        offsets: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert times is not None
        by_index = self.position == "index"
        index = event_index(shape, offsets, times.device) if by_index else times
        looking_from = shifted_times(times, lengths, t_now, offsets) if self.shifted and not by_index else times
        return self.coordinates_at(times, looking_from, index)

    def coordinates_at(self, times: Tensor, query_times: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        queries, keys = self.uncentred_at(times, query_times, index)
        if self.conditioning == "span":
            origin = self.get_buffer("t0")
            queries, keys = queries - origin, keys - origin
        return queries, keys

    def uncentred_at(self, times: Tensor, query_times: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates without the origin, for a kernel that subtracts it itself."""
        if self.position == "index":
            keys, queries = index, index + 1 if self.shifted else index
        else:
            keys, queries = times, query_times if self.shifted else times
        return queries[None], keys[None]

    def check_call(
        self, shape: torch.Size, times: Tensor | None, lengths: Tensor | None, t_now: Tensor | None,
        offsets: Tensor | None, allow_past: bool,
    ) -> None:  # fmt: skip
        if self.require_t_now and t_now is None:
            raise ValueError("t_now is required here (require_t_now=True), got None; pass the moment to recommend for")
        self._check_own_dtypes()
        super().check_call(shape, times, lengths, t_now, offsets, allow_past)

    def _check_own_dtypes(self) -> None:
        """`_apply` keeps dtypes; a library that sets tensors itself (Transformers with dtype=bfloat16) does not."""
        for name, x in (*self._parameters.items(), *self._buffers.items()):
            whole = name in ("t0", "span", "_constant_bits")
            if x is not None and (x.is_floating_point() if whole else x.dtype in (torch.bfloat16, torch.float16)):
                raise ValueError(
                    f"{name} of this TRoPE was cast to {x.dtype}, which rotates by other angles; load the model in "
                    "float32 and cast it with .to(), which leaves TRoPE as it is, or with FSDP2 call fully_shard on "
                    "each TRoPE first, without a mixed precision"
                )

    def extra_repr(self) -> str:
        parts = ("learnable", "multiscale", "shifted", "conjugate", "rotate_query", "rotate_key")
        off = [part for part in parts if not getattr(self, part)]
        choices = f"position={self.position}, bank={self.bank}, conditioning={self.conditioning}, phase={self.phase}"
        return f"{super().extra_repr()}, {choices}" + (f", without {', '.join(off)}" if off else "")


def frequency_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The learned coefficients of every rotary encoding in a model: give them an optimiser group without decay."""
    encodings = nn.ModuleList(module for module in model.modules() if isinstance(module, Rotary))
    yield from encodings.parameters()  # layers that share coefficients have them once
