"""Triton steps that rooms share; not a room.

`lang` holds the arithmetic that kernels have in common, `runtime` how a kernel is launched, `warm` how all of them are
compiled before that, `aot` and `targets` what they need on devices that are not here. Every other file is one step: its
kernels, the launcher under the field's name, and `variants`, all compiled forms that the launcher can ask for.
"""
