"""Data sets of the Hugging Face Hub, as the Parquet files that the Hub itself makes of every data set.

They lie on the branch refs/convert/parquet as ``<config>/<split>/0000.parquet``, so one reader serves all, and no code
of a data set runs here.
"""

from __future__ import annotations

from collections.abc import Iterator

from trace_megatron.data.files import Row, read_rows
from trace_megatron.errors import UserError

_REVISION = "refs/convert/parquet"


def read_hub(repository: str, config: str, split: str) -> Iterator[Row]:
    """Rows of one split, downloaded into the Hub's own cache.

    Raises UserError where huggingface_hub is missing, the Hub cannot be reached, the data set is not there or wants
    an account that has accepted its terms.
    """
    for path in _download(repository, config, split):
        yield from read_rows(path)


def _download(repository: str, config: str, split: str) -> list[str]:
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError as error:
        raise UserError(
            f"expected the package huggingface_hub to download '{repository}', found no {error.name}: pip install "
            "huggingface_hub, or give the data as files with --from"
        ) from error
    try:
        names = hub.HfApi().list_repo_files(repository, repo_type="dataset", revision=_REVISION)
        wanted = sorted(name for name in names if name.startswith(f"{config}/{split}/") and name.endswith(".parquet"))
        if not wanted:
            raise UserError(
                f"expected the split '{split}' of the configuration '{config}' in '{repository}', found "
                f"{', '.join(sorted({name.rpartition('/')[0] for name in names})) or 'nothing'}: download the data "
                "yourself and give it with --from"
            )
        return [hub.hf_hub_download(repository, name, repo_type="dataset", revision=_REVISION) for name in wanted]
    except errors.GatedRepoError as error:
        raise UserError(
            f"expected access to '{repository}', found it gated: accept its terms on the Hub and log in with "
            "`hf auth login`, or give the data as files with --from"
        ) from error
    except (errors.HfHubHTTPError, *errors.HfHubHTTPError.__bases__, OSError) as error:  # its bases: the transport's
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"expected '{repository}' from the Hugging Face Hub, found {type(error).__name__}: {reason}: go online, or "
            "give the data as files with --from"
        ) from error
