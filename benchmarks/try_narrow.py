import sys, time
import benchmarks.attention_parts as a
from trope.kernels.attention import narrow
defines = narrow._defines
def way(fr=32, fp=3, fq=64, fs=2, kr=32, kp=2, k=64, ks=2):
    more = (("FORWARD_ROWS", fr), ("FORWARD_PROGRAMS", fp), ("FORWARD_QUERIES", fq), ("FORWARD_STAGES", fs),
            ("KEY_ROWS", kr), ("KEY_PROGRAMS", kp), ("KEYS", k), ("KEY_STAGES", ks))
    ft, kt = 64 * fq // fr, 64 * k // kr
    return [(narrow, "_defines", lambda *x: defines(*x) + more),
            (narrow, "FORWARD", narrow.Tile(fq, ft, fs * (16384 + fq * 128))),
            (narrow, "KEYS", narrow.Tile(k, kt, ks * (16384 + k * 128)))]
a.WAYS = [("triton", a.TRITON), ("new", []),
  ("k 32 3, f 3 stages", way(kp=3, fs=3)),
  ("k 16 2, f 32 64 2", way(kr=16, fp=2)),
  ("k 32 2 3 stages", way(ks=3)),
]
sys.argv = ["x"]
a.main()
