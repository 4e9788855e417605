"""Ranking the full catalogue, exactly and in bounded memory: the matrix of all scores never exists.

tiles.py         what the others share: tiles of the catalogue, dot products, pairs that are left out
topk.py          `top_k`: the k best items of each user, for serving; `top_k_of`: by any scores; `top_k_among`: of some;
                 `users_together`: how many users to rank at a time
places.py        `count_places`: where given items stand in a user's ranking, for evaluation by any scorer
shards.py        both over a table whose rows are spread over processes
user_batches.py  the same for all users of a split by the kernel in trope/kernels/ranking, for a model on a GPU
"""

from trope.evaluate.ranking.places import count_places
from trope.evaluate.ranking.tiles import Cells, LeavesOut, TileScores, check_finite, dot_scores
from trope.evaluate.ranking.topk import TopK, top_k, top_k_among, top_k_of, users_together

__all__ = [
    "Cells", "LeavesOut", "TileScores", "TopK", "check_finite", "count_places", "dot_scores", "top_k", "top_k_among",
    "top_k_of", "users_together",
]  # fmt: skip
