"""Reading what ptxas and nvdisasm print."""

from __future__ import annotations

import pytest

from flashhopper import inspect_kernel
from flashhopper.inspect_kernel import PtxasReport, count_opcodes, disassemble

LOG = """\
\x1b[96mremark[ptxas info]:\x1b[0m ptxas output: ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async \
instructions are serialized due to insufficient register resources in function 'kernel'
ptxas info    : (C7508) 'setmaxnreg' ignored; unable to determine register count at entry
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
ptxas info    : Function properties for kernel
ptxas         .     16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 16 bytes cumulative stack size
"""

SASS = """\
\t.headerflags\t@"EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDL.64 R2, [R1+0x8] ;
        /*0020*/              @UP1 UTMALDG.4D [UR24], [UR6], desc[URZ] ;
        /*0030*/             @!UPT HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], R24, gsb0 ;
.L_x_0:
        /*10050*/                  WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*10060*/              @P6 F2FP.BF16.F32.PACK_AB R5, R6, R7 ;
        /*10070*/                  BRA `(.L_x_0);
"""


def test_ptxas_numbers_and_remarks() -> None:
    report = PtxasReport.parse(LOG)
    assert (report.registers, report.spill_bytes, report.stack_bytes) == (168, 40, 16)
    assert [remark[:5] for remark in report.remarks] == ["C7514", "C7508"]
    assert report.remarks[1] == "C7508 'setmaxnreg' ignored; unable to determine register count at entry"


def test_silent_ptxas_is_an_error_and_not_a_clean_report() -> None:
    with pytest.raises(ValueError, match="neither registers nor spills"):
        PtxasReport.parse("ptxas info    : 0 bytes gmem")


def test_opcodes_are_counted_without_modifiers_and_predicates() -> None:
    counts = count_opcodes(SASS)
    assert counts == {"HGMMA": 2, "LDC": 1, "LDL": 1, "UTMALDG": 1, "WARPGROUP": 1, "F2FP": 1, "BRA": 1}
    assert next(iter(counts)) == "HGMMA"


def test_missing_nvdisasm_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_kernel, "find_nvdisasm", lambda: None)
    with pytest.raises(FileNotFoundError, match="pip install nvidia-cuda-nvdisasm"):
        disassemble(b"")
