import torch
from trope.bench.shapes import find_shape, generate
from trope.bench.train import Bench
torch.set_float32_matmul_precision("high")
shape = find_shape("pixel1m")
d = torch.device("cuda")
b = Bench(shape, "hstu-trope", generate(shape, 8 * shape.batch, full=True, device=d), d)
s = b.make_fused(); s.is_captured = False
for _ in range(2): s(*b.place())
torch.cuda.synchronize()
