"""The comparison of the exports with a newer rdma-core's is able to fail."""

from pathlib import Path

import pytest

from .exports_check import main

SCRIPT = """
/* ibv_not_this_one; */
IBVERBS_1.1 {{
	global:
		ibv_open_device;
		{public};
	local: *;
}} IBVERBS_1.0;
IBVERBS_PRIVATE_@IBVERBS_PABI_VERSION@ {{
	global:
		ibv_cmd_query_port;
		verbs_register_driver_@IBVERBS_PABI_VERSION@;
}};
"""
SYMBOLS = " ibv_open_device@IBVERBS_1.1 1.1.6\n {public}@IBVERBS_1.1 65\n"


@pytest.mark.parametrize(
    ("name", "text"), [("libibverbs.map.in", SCRIPT), ("libibverbs1.symbols", SYMBOLS)]
)
def test_what_is_missing_is_named(
    name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="make exports NEWER="):
        main([str(tmp_path)])
    file = tmp_path / "below" / name
    file.parent.mkdir()
    for public, told in {
        "ibv_close_device": "",
        "ibv_of_tomorrow": "  ibv_of_tomorrow (IBVERBS_1.1)\n",
        "ibv_reg_dmabuf_mr": "  ibv_reg_dmabuf_mr (IBVERBS_1.1, here IBVERBS_1.12)\n",
    }.items():
        file.write_text(text.format(public=public))
        if told:
            with pytest.raises(SystemExit, match="lacks names"):
                main([str(tmp_path)])
        else:
            main([str(file)])
        assert capsys.readouterr().out.partition("missing\n")[2] == told
