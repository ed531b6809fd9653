/* A driver's library on paper: what it says lies in a mapped file that a test changes meanwhile.
 *
 * Built by tests/support/fake_nvml.py, which has the same structures and names the file in the
 * environment variable PACEKEEPER_FAKE_NVML. Signatures and layouts are those of NVIDIA's nvml.h
 * as nvidia-ml-py calls it. A number that is NOT_TOLD is not supported by this device.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
       INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10 };
enum { POLL_MS = 50 }; /* of events: a real driver sleeps until one comes */
enum { MAX_DEVICES = 16, MAX_INSTANCES = 8, MAX_PIDS = 8, MAX_XIDS = 64, MAX_FIELDS = 512 };
#define NOT_TOLD INT64_MIN
#define XID_EVENT 8ULL

typedef int result;

struct field { uint32_t id, scope, type, code; uint64_t value; };

struct device {
    char uuid[96], name[96];
    int64_t code, delay_us;
    int64_t sm_clock, sm_clock_max, memory_clock, memory_clock_max, sm_clock_set;
    int64_t temperature, margin, power_mw, power_limit_mw, energy_mj, utilisation, memory_used;
    int64_t reasons, pcie_generation, pcie_width, pcie_generation_max, pcie_width_max;
    int64_t pcie_replays, ecc_uncorrected, rows_without_spare;
    int64_t sm_active_percent, tensor_active_percent, memory_active_percent;
    int64_t num_links, num_instances, num_pids, num_xids, num_fields;
    int64_t pids[MAX_PIDS], xids[MAX_XIDS];
    struct field fields[MAX_FIELDS];
};

struct state { int64_t init_code, life, num_devices, num_calls; struct device devices[MAX_DEVICES]; };

struct handle { struct device *device; int64_t slot; }; /* slot -1: the whole device */

struct memory { unsigned long long total, free, used; };
struct utilisation { unsigned gpu, memory; };
struct process { unsigned pid; unsigned long long used; unsigned instance, compute_instance; };
struct histogram { unsigned max, high, partial, low, none; };
struct margin { unsigned version; int margin; };
struct field_value { unsigned id, scope; int64_t time, latency; unsigned type; result code; uint64_t value; };
struct event { void *device; unsigned long long type, data; unsigned instance, compute_instance; };
struct gpm_support { unsigned version, is_supported; };
struct gpm_metric { unsigned id; result code; double value; char *names[3]; };
struct gpm_get { unsigned version, count; void *first, *second; struct gpm_metric metrics[]; };

static struct state *state;
static int64_t life; /* of the driver we are initialised with */
static struct handle handles[MAX_DEVICES][MAX_INSTANCES + 1];
static int64_t seen_xids[MAX_DEVICES];
static char event_set;

static void wait_us(int64_t us) {
    struct timespec time = { us / 1000000, us % 1000000 * 1000 };
    nanosleep(&time, NULL);
}

static result check(struct handle *handle) {
    if (!state || life != state->life) return UNINITIALIZED;
    __atomic_add_fetch(&state->num_calls, 1, __ATOMIC_RELAXED);
    if (!handle) return SUCCESS;
    if (handle->device->delay_us) wait_us(handle->device->delay_us);
    return handle->device->code;
}

static result tell(struct handle *handle, int64_t value, unsigned *answer) {
    result code = check(handle);
    if (code) return code;
    if (value == NOT_TOLD) return NOT_SUPPORTED;
    *answer = (unsigned)value;
    return SUCCESS;
}

static result tell_wide(struct handle *handle, int64_t value, unsigned long long *answer) {
    result code = check(handle);
    if (code) return code;
    if (value == NOT_TOLD) return NOT_SUPPORTED;
    *answer = (unsigned long long)value;
    return SUCCESS;
}

static result tell_text(struct handle *handle, const char *value, char *answer, unsigned size) {
    result code = check(handle);
    if (code) return code;
    strncpy(answer, value, size);
    if (handle->slot >= 0 && strlen(value) + 9 < size) { /* an instance: its number behind it */
        strcat(answer, " MIG 0");
        answer[strlen(answer) - 1] += (char)handle->slot;
    }
    return SUCCESS;
}

result nvmlInitWithFlags(unsigned flags) {
    const char *path = getenv("PACEKEEPER_FAKE_NVML");
    (void)flags;
    if (!path) return DRIVER_NOT_LOADED;
    if (!state) {
        int file = open(path, O_RDWR);
        void *mapped = file < 0 ? MAP_FAILED
            : mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (file >= 0) close(file);
        if (mapped == MAP_FAILED) return DRIVER_NOT_LOADED;
        state = mapped;
    }
    if (state->init_code) return (result)state->init_code;
    life = state->life;
    for (int index = 0; index < MAX_DEVICES; index++)
        for (int slot = -1; slot < MAX_INSTANCES; slot++)
            handles[index][slot + 1] = (struct handle){ &state->devices[index], slot };
    return SUCCESS;
}

result nvmlShutdown(void) { return check(NULL); }

const char *nvmlErrorString(result code) {
    (void)code;
    return "an error of the driver on paper";
}

result nvmlDeviceGetCount_v2(unsigned *count) {
    result code = check(NULL);
    if (!code) *count = (unsigned)state->num_devices;
    return code;
}

result nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    result code = check(NULL);
    if (code) return code;
    if (index >= state->num_devices) return INVALID_ARGUMENT;
    *device = &handles[index][0];
    return state->devices[index].code;
}

#define DEVICE(handle) (((struct handle *)(handle))->device)
#define NUMBER(function, member) \
    result function(void *handle, unsigned *answer) { return tell(handle, DEVICE(handle)->member, answer); }
#define WIDE_NUMBER(function, member) \
    result function(void *handle, unsigned long long *answer) { return tell_wide(handle, DEVICE(handle)->member, answer); }

NUMBER(nvmlDeviceGetPowerUsage, power_mw)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, power_limit_mw)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, pcie_generation)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, pcie_width)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, pcie_generation_max)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, pcie_width_max)
NUMBER(nvmlDeviceGetPcieReplayCounter, pcie_replays)
WIDE_NUMBER(nvmlDeviceGetTotalEnergyConsumption, energy_mj)
WIDE_NUMBER(nvmlDeviceGetCurrentClocksEventReasons, reasons)

result nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size) {
    return tell_text(handle, DEVICE(handle)->uuid, uuid, size);
}

result nvmlDeviceGetName(void *handle, char *name, unsigned size) {
    return tell_text(handle, DEVICE(handle)->name, name, size);
}

result nvmlDeviceGetClockInfo(void *handle, unsigned which, unsigned *clock) {
    struct device *device = DEVICE(handle);
    return tell(handle, which == 1 ? device->sm_clock : device->memory_clock, clock);
}

result nvmlDeviceGetMaxClockInfo(void *handle, unsigned which, unsigned *clock) {
    struct device *device = DEVICE(handle);
    return tell(handle, which == 1 ? device->sm_clock_max : device->memory_clock_max, clock);
}

result nvmlDeviceGetApplicationsClock(void *handle, unsigned which, unsigned *clock) {
    (void)which;
    return tell(handle, DEVICE(handle)->sm_clock_set, clock);
}

result nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *celsius) {
    (void)sensor;
    return tell(handle, DEVICE(handle)->temperature, celsius);
}

result nvmlDeviceGetMarginTemperature(void *handle, struct margin *margin) {
    unsigned value = 0;
    result code = tell(handle, DEVICE(handle)->margin, &value);
    if (!code) margin->margin = (int)value;
    return code;
}

result nvmlDeviceGetUtilizationRates(void *handle, struct utilisation *rates) {
    if (DEVICE(handle)->num_instances) return NOT_SUPPORTED;
    return tell(handle, DEVICE(handle)->utilisation, &rates->gpu);
}

result nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
    result code = tell_wide(handle, DEVICE(handle)->memory_used, &memory->used);
    if (!code && ((struct handle *)handle)->slot >= 0)
        memory->used = 1000 + (unsigned long long)((struct handle *)handle)->slot;
    return code;
}

result nvmlDeviceGetTotalEccErrors(void *handle, unsigned kind, unsigned counter, unsigned long long *count) {
    (void)kind, (void)counter;
    return tell_wide(handle, DEVICE(handle)->ecc_uncorrected, count);
}

result nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *found) {
    struct device *device = DEVICE(handle);
    unsigned room = *count;
    result code = tell(handle, device->num_pids, count);
    if (code) return code;
    if (room < *count) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++) found[i] = (struct process){ .pid = (unsigned)device->pids[i] };
    return SUCCESS;
}

result nvmlDeviceGetRowRemapperHistogram(void *handle, struct histogram *banks) {
    return tell(handle, DEVICE(handle)->rows_without_spare, &banks->none);
}

result nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    result code = tell(handle, DEVICE(handle)->num_instances, current);
    if (!code) *current = *pending = *current > 0;
    return code;
}

result nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
    result code = check(handle);
    if (!code) *count = MAX_INSTANCES;
    return code;
}

result nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **instance) {
    result code = check(handle);
    if (code) return code;
    if (index >= DEVICE(handle)->num_instances) return NOT_FOUND;
    *instance = &handles[DEVICE(handle) - state->devices][index + 1];
    return SUCCESS;
}

result nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *is_active) {
    result code = check(handle);
    if (code) return code;
    if (link >= DEVICE(handle)->num_links) return INVALID_ARGUMENT;
    *is_active = 1;
    return SUCCESS;
}

result nvmlDeviceGetFieldValues(void *handle, int count, struct field_value *values) {
    struct device *device = DEVICE(handle);
    result code = check(handle);
    for (int i = 0; !code && i < count; i++) {
        values[i].code = NOT_SUPPORTED;
        for (int64_t at = 0; at < device->num_fields; at++) {
            struct field *field = &device->fields[at];
            if (field->id != values[i].id || field->scope != values[i].scope) continue;
            values[i].code = (result)field->code;
            values[i].type = field->type;
            values[i].value = field->value;
        }
    }
    return code;
}

result nvmlGpmQueryDeviceSupport(void *handle, struct gpm_support *support) {
    result code = check(handle);
    support->is_supported = DEVICE(handle)->sm_active_percent != NOT_TOLD;
    return code;
}

result nvmlGpmSampleAlloc(void **sample) {
    *sample = malloc(sizeof(struct handle *));
    return check(NULL);
}

result nvmlGpmSampleFree(void *sample) {
    free(sample);
    return check(NULL);
}

result nvmlGpmSampleGet(void *handle, void *sample) {
    *(struct handle **)sample = handle;
    return check(handle);
}

result nvmlGpmMetricsGet(struct gpm_get *asked) {
    struct device *device = (*(struct handle **)asked->second)->device;
    for (unsigned i = 0; i < asked->count; i++) {
        struct gpm_metric *metric = &asked->metrics[i];
        int64_t value = metric->id == 2 ? device->sm_active_percent
            : metric->id == 5 ? device->tensor_active_percent : device->memory_active_percent;
        metric->code = value == NOT_TOLD ? NOT_SUPPORTED : SUCCESS;
        metric->value = (double)value;
    }
    return check(NULL);
}

result nvmlEventSetCreate(void **set) {
    result code = check(NULL);
    *set = &event_set;
    return code;
}

result nvmlDeviceRegisterEvents(void *handle, unsigned long long types, void *set) {
    result code = check(handle);
    (void)set;
    if (!(types & XID_EVENT) || DEVICE(handle)->num_xids == NOT_TOLD) return NOT_SUPPORTED;
    seen_xids[DEVICE(handle) - state->devices] = DEVICE(handle)->num_xids;
    return code;
}

result nvmlEventSetWait_v2(void *set, struct event *event, unsigned timeout_ms) {
    (void)set;
    for (unsigned waited_ms = 0; waited_ms <= timeout_ms; waited_ms += POLL_MS) {
        if (!state || life != state->life) return UNINITIALIZED;
        for (int64_t i = 0; i < state->num_devices; i++) {
            struct device *device = &state->devices[i];
            if (device->num_xids <= seen_xids[i]) continue;
            unsigned long long code = (unsigned long long)device->xids[seen_xids[i]++ % MAX_XIDS];
            *event = (struct event){ &handles[i][0], XID_EVENT, code, ~0u, ~0u };
            return SUCCESS;
        }
        wait_us(POLL_MS * 1000);
    }
    return TIMEOUT;
}

result nvmlEventSetFree(void *set) {
    (void)set;
    return check(NULL);
}
