"""PyTorch, Transformers and what of ours loads models, imported quickly: what a process that trains does first."""

from __future__ import annotations

import gc
import importlib
import sys

HIDDEN = ("librosa", "scipy", "sklearn", "soundfile", "torchaudio", "torchvision")
"""What Transformers imports wherever it is installed, for losses, images, sound and assisted decoding that no text
target uses. Each is asked for once, when Transformers is imported, and the answer is kept."""


def import_models() -> None:
    """Import what loads a target, in a process of paceline's own: less of it, and without looking for garbage.

    Both last: to this process's Transformers `HIDDEN` stays away (who imports a package of it himself gets it), and
    what is imported by then is never gone through for garbage again (`gc.freeze`), which takes 0.2 s each time. A
    process of someone else's wants neither. Nothing is done where Transformers was imported before.

    2026-12-01, CPU seconds: 4.9 became 2.8 with scipy, scikit-learn, torchvision and torchaudio installed, 3.0 became
    2.3 without.
    """
    if "transformers" in sys.modules:
        return
    hidden = [name for name in HIDDEN if name not in sys.modules]
    collects = gc.isenabled()
    gc.disable()  # some 450,000 objects, hardly one of them garbage; to go through them took a fifth of the time
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: neither found nor imported
    try:
        for name in ("draft", "target"):
            importlib.import_module(f"paceline.models.{name}")
    finally:
        for name in hidden:
            if sys.modules[name] is None:
                del sys.modules[name]
        gc.freeze()
        if collects:
            gc.enable()
