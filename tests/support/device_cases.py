"""What a device may show, and which causes follow from it: with three healthy peers, and alone."""

from typing import Any

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.predictor.causes.evidence import CauseKind
from support.symptoms import RANK_PID

CONFIRMED, PROBABLE, SUSPECTED = Tier.CONFIRMED, Tier.PROBABLE, Tier.SUSPECTED
K = CauseKind
LOW = {"sm_clock_mhz": 1300.0}

# (what the device shows, [(kind, sure beside three healthy peers, sure alone, some of the words)])
# None: not taken for a cause. Alone, readings that only mean something beside peers are silent.
Expected = list[tuple[CauseKind, Tier, Tier | None, str]]
DEVICES: list[tuple[str, dict[str, Any], Expected]] = [
    (
        "hot by its own word, and its clock is down",
        {"clock_event_reasons": 0x40, **LOW},
        [
            (K.THERMAL, CONFIRMED, PROBABLE, "hardware thermal slowdown in 1 of 1 samples"),
            (K.CLOCKS, PROBABLE, SUSPECTED, "SM clock 1300 MHz"),
        ],
    ),
    (
        "hot by its own word, its clock is not down",
        {"clock_event_reasons": 0x20},
        [(K.THERMAL, PROBABLE, SUSPECTED, "software thermal slowdown (none of 3 peers)")],
    ),
    (
        "power brake, clock not told",
        {"clock_event_reasons": 0x80, "sm_clock_mhz": None},
        [(K.POWER, PROBABLE, SUSPECTED, "power brake")],
    ),
    (
        "hardware slowdown",
        {"clock_event_reasons": 0x8, **LOW},
        [
            (K.CLOCKS, CONFIRMED, PROBABLE, "reports hardware slowdown"),
            (K.CLOCKS, PROBABLE, SUSPECTED, "x1.46 slow"),
        ],
    ),
    (
        "power cap without effect: common in health",
        {"clock_event_reasons": 0x4},
        [(K.POWER, SUSPECTED, SUSPECTED, "software power cap")],
    ),
    (
        "power cap with a low clock",
        {"clock_event_reasons": 0x4, **LOW},
        [
            (K.POWER, PROBABLE, SUSPECTED, "software power cap"),
            (K.CLOCKS, PROBABLE, SUSPECTED, "SM clock 1300 MHz"),
        ],
    ),
    (
        "sync boost",
        {"clock_event_reasons": 0x10},
        [(K.CLOCKS, SUSPECTED, SUSPECTED, "sync boost")],
    ),
    (
        "display clock setting",
        {"clock_event_reasons": 0x100},
        [(K.CLOCKS, SUSPECTED, SUSPECTED, "display clock")],
    ),
    (
        "idles while its peers work",
        {"clock_event_reasons": 0x1},
        [(K.STARVED, SUSPECTED, None, "its node feeds it too slowly")],
    ),
    (
        "clock down without a reason",
        LOW,
        [(K.CLOCKS, PROBABLE, SUSPECTED, "SM clock 1300 MHz")],
    ),
    ("clock a little down", {"sm_clock_mhz": 1800.0}, []),
    ("clock down because it idles", {"utilisation_ratio": 0.1, **LOW}, []),
    (
        "hotter than its peers",
        {"temperature_celsius": 88.0},
        [(K.THERMAL, SUSPECTED, SUSPECTED, "88 degrees")],
    ),
    (
        "hotter than its peers, not hot",
        {"temperature_celsius": 75.0},
        [(K.THERMAL, SUSPECTED, None, "its peers had 60")],
    ),
    ("a little warmer", {"temperature_celsius": 66.0}, []),
    (
        "lower power limit",
        {"power_limit_watts": 500.0, "power_watts": 400.0},
        [(K.POWER, PROBABLE, SUSPECTED, "limit is 500 W, its peers' 700 W")],
    ),
    (
        "at its power limit",
        {"power_watts": 699.0},
        [(K.POWER, SUSPECTED, None, "draws all of its power limit")],
    ),
    (
        "narrow link",
        {"pcie_width": 4},
        [(K.PCIE, PROBABLE, SUSPECTED, "PCIe width x4")],
    ),
    (
        "old link",
        {"pcie_generation": 3},
        [(K.PCIE, PROBABLE, SUSPECTED, "PCIe generation 3, its peers generation 5")],
    ),
    ("narrow link while idle", {"pcie_width": 4, "utilisation_ratio": 0.0}, []),
    (
        "replays grow",
        {"pcie_replays": 40},
        [(K.PCIE, SUSPECTED, SUSPECTED, "37 new PCIe replays")],
    ),
    (
        "memory errors grow",
        {"ecc_uncorrected": 2},
        [(K.MEMORY_ERRORS, PROBABLE, SUSPECTED, "2 new uncorrected ECC errors")],
    ),
    (
        "a foreign process",
        {"processes": (RANK_PID, 4242)},
        [(K.FOREIGN_PROCESS, PROBABLE, SUSPECTED, "use the device: 4242 (none of 3 peers)")],
    ),
    (
        "held down by heat most of the time, and its clock is down",
        {"hw_thermal_held_s": 8.8, "clock_event_reasons": 0x40, **LOW},
        [
            (K.THERMAL, CONFIRMED, PROBABLE, "slowdown held its clocks down 80% of the time"),
            (K.CLOCKS, PROBABLE, SUSPECTED, "SM clock 1300 MHz"),
        ],
    ),
    (
        "held down by heat between the moments that the mask shows",
        {"sw_thermal_held_s": 4.4},
        [(K.THERMAL, PROBABLE, SUSPECTED, "software thermal slowdown held its clocks down 40%")],
    ),
    (
        "power brake by its counter",
        {"power_brake_held_s": 11.0, **LOW},
        [
            (K.POWER, CONFIRMED, PROBABLE, "power brake (asserted from outside) held its clocks"),
            (K.CLOCKS, PROBABLE, SUSPECTED, "SM clock 1300 MHz"),
        ],
    ),
    (
        "power cap by its counter, without effect",
        {"power_cap_held_s": 61.0},
        [(K.POWER, SUSPECTED, SUSPECTED, "software power cap held its clocks down 100%")],
    ),
    (
        "board limit by its counter",
        {"board_limit_held_s": 11.0, **LOW},
        [
            (K.POWER, PROBABLE, SUSPECTED, "board limit held its clocks down 100%"),
            (K.CLOCKS, PROBABLE, SUSPECTED, "SM clock 1300 MHz"),
        ],
    ),
    ("held down for a moment", {"hw_thermal_held_s": 0.9}, []),
    ("a counter of time that began anew", {"power_cap_held_s": 0.0}, []),
    (
        "application clock set low",
        {"health": {"sm_clock_set_mhz": 1200.0}},
        [(K.CLOCKS, PROBABLE, None, "application clock is set to 1200 MHz, its peers' to 1980")],
    ),
    (
        "hot memory",
        {"memory_temperature_celsius": 97.0},
        [(K.THERMAL, SUSPECTED, SUSPECTED, "its memory has 97 degrees Celsius")],
    ),
    (
        "near its limit by its own measure",
        {"margin_celsius": 2.0},
        [(K.THERMAL, SUSPECTED, SUSPECTED, "2 degrees below the temperature at which it slows")],
    ),
    (
        "multiprocessors that wait",
        {"sm_active_ratio": 0.5},
        [(K.STARVED, SUSPECTED, None, "worked 50% of the time, its peers' 80%")],
    ),
    (
        "lost",
        {"is_lost": True},
        [(K.LOST, CONFIRMED, PROBABLE, "the device is lost")],
    ),
    (
        "Xids: each by what it means, one from before the onset left out",
        {"health": {"num_xids": 3, "xids": (31, 74, 79)}},
        [
            (K.LOST, CONFIRMED, PROBABLE, "the driver reported Xid 79, the device fell off its"),
            (K.NVLINK, PROBABLE, SUSPECTED, "Xid 74, an NVLink error (none of 3 peers)"),
        ],
    ),
    (
        "an Xid of the application",
        {"health": {"num_xids": 2, "xids": (31, 13)}},
        [(K.DRIVER, SUSPECTED, SUSPECTED, "Xid 13, a graphics exception, mostly of the appl")],
    ),
    (
        "an Xid that nobody knows",
        {"health": {"num_xids": 2, "xids": (31, 999)}},
        [(K.DRIVER, SUSPECTED, SUSPECTED, "Xid 999, see NVIDIA's catalog")],
    ),
    (
        "NVLinks down",
        {"health": {"nvlinks_up": 16, "nvlink_bytes_per_s": 425e9}},
        [
            (K.NVLINK, PROBABLE, SUSPECTED, "2 of its NVLinks are down"),
            (K.NVLINK, PROBABLE, None, "add up to 425 GB/s, those of its peers to 478"),
        ],
    ),
    (
        "NVLink errors grow",
        {"health": {"nvlink_errors": 9, "nvlink_recoveries": 1}},
        [
            (K.NVLINK, SUSPECTED, SUSPECTED, "4 new damaged NVLink packets"),
            (K.NVLINK, SUSPECTED, SUSPECTED, "1 new NVLink recoveries"),
        ],
    ),
    (
        "PCIe errors grow",
        {"health": {"pcie_errors": 3, "pcie_fatal_errors": 1}},
        [
            (K.PCIE, PROBABLE, SUSPECTED, "1 new uncorrected PCIe errors"),
            (K.PCIE, SUSPECTED, SUSPECTED, "1 new corrected PCIe errors"),
        ],
    ),
    ("a counter that began anew", {"health": {"pcie_errors": 0, "num_xids": 0, "xids": ()}}, []),
    (
        "corrected memory errors grow",
        {"health": {"ecc_corrected": 106}},
        [(K.MEMORY_ERRORS, SUSPECTED, SUSPECTED, "100 new corrected ECC errors")],
    ),
    (
        "rows wait for a reset",
        {"health": {"is_remap_pending": True}},
        [(K.MEMORY_ERRORS, SUSPECTED, SUSPECTED, "damaged rows of its memory wait for a reset")],
    ),
    (
        "no spare row",
        {"health": {"has_remap_failed": True}},
        [(K.MEMORY_ERRORS, PROBABLE, SUSPECTED, "could not be replaced")],
    ),
    (
        "the driver asks for a reset",
        {"health": {"recovery_action": 1}},
        [(K.DRIVER, PROBABLE, SUSPECTED, "the driver asks for a reset of the device")],
    ),
    (
        "a driver that answers late",
        {"answer_s": 3.2},
        [(K.DRIVER, SUSPECTED, SUSPECTED, "its driver took 3.2 s to answer")],
    ),
    ("process numbers of another namespace", {"processes": (900001,)}, []),
    ("a process list that is empty", {"processes": ()}, []),
]
