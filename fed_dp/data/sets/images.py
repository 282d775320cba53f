"""A folder of images, a folder for each class: PNG and JPEG, also with a folder for each client."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fed_dp.data.dataset import DataSet, Records, every_nth, identity
from fed_dp.data.options import Data
from fed_dp.errors import DataCorrupt, DataMissing
from fed_dp.options import Words

ENDINGS = (".png", ".jpg", ".jpeg")
Side = Annotated[int, Field(ge=1, le=4096)]


class Images(Data):
    """`path`/CLASS/*.png, or `path`/CLIENT/CLASS/*.png; train and test beneath it, or every n-th held out.

    All images are brought to one size and one mode, which are stated and not taken from the files.
    """

    name: Literal["images"] = "images"
    size: Annotated[tuple[Side, Side], Field(strict=False)] | None = None  # height, width
    colour: bool = True  # false: one channel of grey
    classes: Words | None = None  # the folders of the classes, in their order
    by_client: bool = False  # whether the folders above those of the classes are clients
    test_share: Annotated[float, Field(gt=0, lt=1)] = 0.2  # held out where there is no folder `test`

    about = "your own: PNG and JPEG in data.path, a folder for each class"
    owners = "the folders of clients"

    @model_validator(mode="after")
    def _stated(self) -> Images:
        for key in ("path", "size", "classes"):
            if getattr(self, key) is None:
                raise ValueError(
                    f"data.{key} is missing: data.name = 'images' needs path, size (height, width) and "
                    "classes (the names of the folders)"
                )
        return self

    def read(self) -> DataSet:
        """Read all images."""
        assert self.path is not None  # checked above
        assert self.classes is not None
        home = Path(self.path)
        if not home.is_dir():
            raise DataMissing(f"data.path = {self.path!r}: no such folder")
        if (home / "train").is_dir():
            train, test = self._records(home / "train"), self._records(home / "test")
        else:
            whole = self._records(home)
            held = every_nth(len(whole), max(2, round(1 / self.test_share)))
            train, test = whole.part(~held), whole.part(held)
        scale, shift = identity()
        return DataSet("images", train, test, len(self.classes), (scale / 255).astype(np.float32), shift)

    def _records(self, home: Path) -> Records:
        clients = sorted(p for p in home.iterdir() if p.is_dir()) if self.by_client else [home]
        x: list[NDArray[np.uint8]] = []
        y: list[int] = []
        owner: list[str] = []
        for client in clients:
            for code, name in enumerate(self.classes or ()):
                folder = client / name
                files = sorted(p for p in folder.glob("*") if p.suffix.lower() in ENDINGS)
                x += [self._pixels(path) for path in files]
                y += [code] * len(files)
                owner += [client.name] * len(files)
        if not x:
            raise DataMissing(
                f"{home}: no images ({', '.join(ENDINGS)}) in folders named {', '.join(self.classes or ())}"
            )
        owners = np.array(owner, np.str_) if self.by_client else None
        return Records(np.stack(x), np.array(y, np.int64), owners)

    def _pixels(self, path: Path) -> NDArray[np.uint8]:
        """Return channels, rows, columns."""
        from PIL import Image, UnidentifiedImageError

        assert self.size is not None  # checked above
        height, width = self.size
        try:
            with Image.open(path) as image:
                found = image.convert("RGB" if self.colour else "L").resize((width, height))
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise DataCorrupt(f"{path} cannot be read as an image: {error}") from None
        pixels = np.asarray(found, np.uint8)
        return pixels.transpose(2, 0, 1) if self.colour else pixels[None]
