"""Export: a model as programs of tensors that run without trope, for PyTorch, for C++ (AOTInductor) and as ONNX.

frozen.py    rotary encodings as constants, because no exporter keeps float64 constants that are read from int64 bits
contexts.py  what blocks ask for, in operations that give the same integers in every format
programs.py  the programs: `remember` and `look`, or `encode` for models that cannot remember
formats.py   a program as a file, and back
folder.py    the exported folder: programs, item table, catalogue, pulse and the manifest with their SHA-256
parity.py    the comparison with the model that is part of every export
exported.py  `ExportedModel`: loads a folder and answers as `Recommender` does
"""
