import sys, time
import benchmarks.attention_parts as a
from trope.kernels.attention import narrow
defines = narrow._defines
def way(fr=32, fp=2, fq=128, fs=2, kr=16, kp=2, k=64, ks=2):
    more = (("FORWARD_ROWS", fr), ("FORWARD_PROGRAMS", fp), ("FORWARD_QUERIES", fq), ("FORWARD_STAGES", fs),
            ("KEY_ROWS", kr), ("KEY_PROGRAMS", kp), ("KEYS", k), ("KEY_STAGES", ks))
    ft, kt = 64 * fq // fr, 64 * k // kr
    return [(narrow, "_defines", lambda *x: defines(*x) + more),
            (narrow, "FORWARD", narrow.Tile(fq, ft, fs * (16384 + fq * 128))),
            (narrow, "KEYS", narrow.Tile(k, kt, ks * (16384 + k * 128) + kt // 32 * kr * 128))]
a.WAYS = [("triton", a.TRITON), ("new", []),
  ("k old, f 16 64 4", way(16, 4, 64, 2, 32, 2, 64, 2)),
  ("k 128 keys, f 16 64 3", way(16, 3, 64, 2, 16, 1, 128, 2)),
  ("k 3 stages, f 16 128 2", way(16, 2, 128, 2, 16, 2, 64, 3)),
  ("k 128 keys 3 stages, f 16 128 1", way(16, 1, 128, 2, 16, 1, 128, 3)),
  ("k 16 64 2, f 32 64 3", way(32, 3, 64, 2)),
  ("k 16 64 2, f 16 128 2 3 stages", way(16, 2, 128, 3)),
]
sys.argv = ["x"]
a.main()
