"""Models without their experts: built on the meta device, their dense parts loaded.

architectures   which are served, and by which class
skeleton        a model that is known but not loaded, and how it is; dense: what stays as stored
implementation  the experts implementation that models are built with
reference       all experts, by transformers' own loading code
"""
