"""Parameters of a model that are made from the tensors of a GGUF file.

conversions  the weight conversion of each parameter, and checks that no tensor is left over
names        llama.cpp's name of each parameter, by gguf's own table
values       operations that undo what llama.cpp's converter does to values
"""
