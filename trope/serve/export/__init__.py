"""Export: a model as programs of tensors that run without trope, for PyTorch, for C++ (AOTInductor) and as ONNX.

frozen.py    rotary encodings as constants, because no exporter keeps float64 constants that are read from int64 bits
contexts.py  what blocks ask for, in operations that give the same integers in every format
intervals.py TiSASRec's attention with tables that no call copies
last_block.py  what `encode` computes of the last block: the last event alone
programs.py  the programs: `encode`, and `remember` and `look` of models that can
formats.py   a program as a file, and back
onnx_integers.py  integer operations that ONNX lacks, or that ONNX Runtime gets wrong
manifest.py  the exported folder's files, how a score is formed, and the manifest with SHA-256
folder.py    writes the folder, whole or not at all
parity.py    the comparison with the model that is part of every export
exported.py  `ExportedModel`: loads a folder and answers as `Recommender` does
"""
