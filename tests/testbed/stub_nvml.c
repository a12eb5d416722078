/*
 * libnvidia-ml.so.1 for machines without a GPU: NVML's exported symbols with the signatures of NVIDIA's own header,
 * answering from a text file that is read again whenever it changes. tests/testbed/nvml_stub.py builds it and writes
 * the file, which the environment variable STUB_NVML_STATE names.
 *
 * A line is "<owner> <key> <value>". The owner is a GPU's number, "*" for all GPUs and the library itself, or
 * "<gpu>.<n>" for the n-th MIG device of a GPU. A value "E<code>" makes the call return that nvmlReturn_t. A key that
 * a GPU lacks is not supported by it. Keys that are not known here are for others and ignored. Values are in NVML's
 * own units (MHz, mW, percent, degrees Celsius).
 *
 *   * count <n>           GPUs found by the next nvmlInit (1)          * init E9       nvmlInit fails
 *   3 all E15             every call about GPU 3 fails: it is lost     3 handle E15    so does only its handle
 *   3 hang power          the call for this key waits until the line is gone ("all": every call; "* hang init")
 *   3 delay.power <ms>    it takes so long
 *   3 xid 79@1,43@2       XID events, each delivered once: <code>@<serial>, in the order of serials
 *   3 pids 71:5000,73     compute processes: <pid>[:<bytes of GPU memory>][@<GPU instance>]
 *   3 mig 1               MIG mode; 3.0 uuid MIG-..., 3.0 pids ...     the MIG device with index 0
 *   others: name uuid bus clock.sm clock_max.sm reasons temperature power power_limit utilization pcie_generation
 *   pcie_width pcie_replays ecc_uncorrected nvlink<n>.state remapped remapped_uncorrected
 *   retired<cause> field<id>[.<scope>]
 *
 * -DSTUB_OLD leaves out the functions that came with later drivers.
 */
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define ENTRIES_MAX 4096
#define SETS_MAX 256
#define GPUS_MAX 64
#define ALL_GPUS (-1)
#define MIGS_PER_GPU 16
#define TICK_NS 2000000L

typedef struct {
    int gpu, mig; /* mig is -1 for the GPU itself */
    char key[40];
    char text[256];
} Entry;

typedef struct {
    int is_used;
    int is_registered[GPUS_MAX];
    long delivered[GPUS_MAX]; /* serial of the last XID */
} EventSet;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Entry entries[ENTRIES_MAX];
static int n_entries;
static struct stat seen;
static int references, generation, n_gpus;
static EventSet event_sets[SETS_MAX];

/* ---- the state file ------------------------------------------------------------------------------------------- */

static int parse_owner(const char *text, Entry *entry)
{
    char *rest;
    entry->mig = -1;
    if (!strcmp(text, "*")) {
        entry->gpu = ALL_GPUS;
        return 1;
    }
    entry->gpu = (int)strtol(text, &rest, 10);
    if (*rest == '.')
        entry->mig = (int)strtol(rest + 1, &rest, 10);
    return rest != text && !*rest;
}

/* With the lock held. */
static void refresh(void)
{
    const char *path = getenv("STUB_NVML_STATE");
    struct stat now;
    char line[512], owner[32];
    FILE *file;

    if (!path || stat(path, &now))
        return;
    if (now.st_ino == seen.st_ino && now.st_size == seen.st_size &&
        !memcmp(&now.st_mtim, &seen.st_mtim, sizeof now.st_mtim))
        return;
    file = fopen(path, "r");
    if (!file)
        return;
    seen = now;
    n_entries = 0;
    while (n_entries < ENTRIES_MAX && fgets(line, sizeof line, file)) {
        Entry *entry = &entries[n_entries];
        if (sscanf(line, "%31s %39s %255[^\n]", owner, entry->key, entry->text) == 3 && parse_owner(owner, entry))
            n_entries++;
    }
    fclose(file);
}

/* With the lock held: what is said of one GPU goes before what is said of all. */
static const char *find(int gpu, int mig, const char *key)
{
    const char *general = NULL;
    for (int i = 0; i < n_entries; i++) {
        if (strcmp(entries[i].key, key) || entries[i].mig != mig)
            continue;
        if (entries[i].gpu == gpu)
            return entries[i].text;
        if (entries[i].gpu == ALL_GPUS)
            general = entries[i].text;
    }
    return general;
}

static nvmlReturn_t code_of(const char *text)
{
    return text && text[0] == 'E' && text[1] >= '0' && text[1] <= '9' ? (nvmlReturn_t)atoi(text + 1) : NVML_SUCCESS;
}

static void pause_ms(long ms)
{
    struct timespec left = {ms / 1000, ms % 1000 * 1000000L};
    while (nanosleep(&left, &left) && errno == EINTR)
        ;
}

/* Copy what the state says of a key, after the waits that it asks for; 0 if it says nothing. */
static int look_up(int gpu, int mig, const char *key, char *text, size_t size)
{
    char delay_key[48];
    const char *found;
    long delay_ms = 0;

    snprintf(delay_key, sizeof delay_key, "delay.%s", key);
    for (int is_first = 1;; is_first = 0) {
        pthread_mutex_lock(&lock);
        refresh();
        found = find(gpu, -1, delay_key);
        if (found && is_first)
            delay_ms = atol(found);
        found = find(gpu, -1, "hang");
        if (!found || (strcmp(found, key) && strcmp(found, "all")))
            break;
        pthread_mutex_unlock(&lock);
        pause_ms(TICK_NS / 1000000L);
    }
    found = find(gpu, mig, key);
    if (found)
        snprintf(text, size, "%s", found);
    pthread_mutex_unlock(&lock);
    if (delay_ms)
        pause_ms(delay_ms);
    return found != NULL;
}

/* ---- devices -------------------------------------------------------------------------------------------------- */

/* A handle of before the last nvmlShutdown is none: its generation is another. */
static nvmlDevice_t handle_of(int gpu, int mig)
{
    return (nvmlDevice_t)((uintptr_t)generation << 16 | (uintptr_t)(gpu + 1) << 8 | (uintptr_t)(mig + 1));
}

static nvmlReturn_t resolve(nvmlDevice_t device, int *gpu, int *mig)
{
    uintptr_t value = (uintptr_t)device;
    char text[256];

    if (!references)
        return NVML_ERROR_UNINITIALIZED;
    *gpu = (int)(value >> 8 & 0xff) - 1;
    *mig = (int)(value & 0xff) - 1;
    if ((int)(value >> 16) != generation || *gpu < 0 || *gpu >= n_gpus)
        return NVML_ERROR_INVALID_ARGUMENT;
    return look_up(*gpu, -1, "all", text, sizeof text) ? code_of(text) : NVML_SUCCESS;
}

static nvmlReturn_t text_of(nvmlDevice_t device, const char *key, char *text, size_t size)
{
    int gpu, mig;
    nvmlReturn_t result = resolve(device, &gpu, &mig);
    if (result)
        return result;
    return look_up(gpu, mig, key, text, size) ? code_of(text) : NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t number(nvmlDevice_t device, const char *key, unsigned long long *value)
{
    char text[256];
    nvmlReturn_t result = value ? text_of(device, key, text, sizeof text) : NVML_ERROR_INVALID_ARGUMENT;
    if (!result)
        *value = text[0] == '-' ? (unsigned long long)strtoll(text, NULL, 0) : strtoull(text, NULL, 0);
    return result;
}

static nvmlReturn_t number32(nvmlDevice_t device, const char *key, unsigned int *value)
{
    unsigned long long wide;
    nvmlReturn_t result = value ? number(device, key, &wide) : NVML_ERROR_INVALID_ARGUMENT;
    if (!result)
        *value = (unsigned int)wide;
    return result;
}

static nvmlReturn_t string(nvmlDevice_t device, const char *key, const char *otherwise, char *out, unsigned int length)
{
    char text[256];
    nvmlReturn_t result = text_of(device, key, text, sizeof text);
    if (result == NVML_ERROR_NOT_SUPPORTED && otherwise) {
        snprintf(text, sizeof text, "%s", otherwise);
        result = NVML_SUCCESS;
    }
    if (!result && strlen(text) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    if (!result)
        strcpy(out, text);
    return result;
}

/* ---- the library ---------------------------------------------------------------------------------------------- */

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    char text[256];
    (void)flags;
    if (look_up(ALL_GPUS, -1, "init", text, sizeof text) && code_of(text))
        return code_of(text);
    if (!references) {
        n_gpus = look_up(ALL_GPUS, -1, "count", text, sizeof text) ? atoi(text) : 1;
        generation++;
    }
    references++;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

nvmlReturn_t nvmlShutdown(void)
{
    if (!references)
        return NVML_ERROR_UNINITIALIZED;
    if (!--references)
        memset(event_sets, 0, sizeof event_sets);
    return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    return result == NVML_SUCCESS ? "Success" : "an error of the stub";
}

static nvmlReturn_t version(const char *key, const char *otherwise, char *out, unsigned int length)
{
    char text[256];
    snprintf(out, length, "%s", look_up(ALL_GPUS, -1, key, text, sizeof text) ? text : otherwise);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *out, unsigned int length)
{
    return version("driver", "580.13.17", out, length);
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *out, unsigned int length)
{
    return version("library", "13.580.13.17", out, length);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    char text[256];
    if (!references)
        return NVML_ERROR_UNINITIALIZED;
    if (look_up(ALL_GPUS, -1, "all", text, sizeof text) && code_of(text) != NVML_ERROR_GPU_IS_LOST)
        return code_of(text);
    *count = (unsigned int)n_gpus;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    char text[256];
    if (!references)
        return NVML_ERROR_UNINITIALIZED;
    if (index >= (unsigned int)n_gpus)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (look_up((int)index, -1, "handle", text, sizeof text) && code_of(text))
        return code_of(text);
    *device = handle_of((int)index, -1);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    int gpu, mig;
    nvmlReturn_t result = resolve(device, &gpu, &mig);
    *index = (unsigned int)gpu;
    return result;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *out, unsigned int length)
{
    return string(device, "name", "NVIDIA Stub", out, length);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *out, unsigned int length)
{
    char otherwise[64];
    int gpu, mig;
    nvmlReturn_t result = resolve(device, &gpu, &mig);
    if (result)
        return result;
    if (mig < 0)
        snprintf(otherwise, sizeof otherwise, "GPU-00000000-0000-0000-0000-%012d", gpu);
    else
        snprintf(otherwise, sizeof otherwise, "MIG-00000000-0000-0000-%04d-%012d", mig, gpu);
    return string(device, "uuid", otherwise, out, length);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    unsigned int bus;
    int gpu, mig;
    nvmlReturn_t result = resolve(device, &gpu, &mig);
    if (result)
        return result;
    result = number32(device, "bus", &bus);
    if (result == NVML_ERROR_NOT_SUPPORTED)
        bus = (unsigned int)gpu + 1;
    else if (result)
        return result;
    memset(pci, 0, sizeof *pci);
    pci->bus = bus;
    snprintf(pci->busId, sizeof pci->busId, "00000000:%02X:00.0", bus & 0xff);
    return NVML_SUCCESS;
}

/* ---- MIG and processes ---------------------------------------------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    nvmlReturn_t result = number32(device, "mig", current);
    if (!result)
        *pending = *current;
    return result;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    int gpu, mig;
    *count = 7;
    return resolve(device, &gpu, &mig);
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *out)
{
    char text[256];
    int gpu, mig;
    nvmlReturn_t result = resolve(device, &gpu, &mig);
    if (result)
        return result;
    if (index >= MIGS_PER_GPU || !look_up(gpu, (int)index, "uuid", text, sizeof text))
        return NVML_ERROR_NOT_FOUND;
    *out = handle_of(gpu, (int)index);
    return NVML_SUCCESS;
}

static nvmlReturn_t processes(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos)
{
    char text[256], *rest = text;
    unsigned int room = *count;
    nvmlReturn_t result = text_of(device, "pids", text, sizeof text);

    *count = 0;
    if (result)
        return result == NVML_ERROR_NOT_SUPPORTED ? NVML_SUCCESS : result;
    for (char *item; (item = strsep(&rest, ","));) {
        const char *memory = strchr(item, ':'), *instance = strchr(item, '@');
        if (infos && *count < room)
            infos[*count] = (nvmlProcessInfo_t){
                .pid = (unsigned int)strtoul(item, NULL, 10),
                .usedGpuMemory = memory ? strtoull(memory + 1, NULL, 10) : (unsigned long long)NVML_VALUE_NOT_AVAILABLE,
                .gpuInstanceId = instance ? (unsigned int)strtoul(instance + 1, NULL, 10) : ~0U,
                .computeInstanceId = instance ? 0 : ~0U,
            };
        ++*count;
    }
    return *count > room || !infos ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *count,
                                                     nvmlProcessInfo_v2_t *infos)
{
    return processes(device, count, infos);
}

/* ---- what is sampled ------------------------------------------------------------------------------------------ */

static const char *clock_name(nvmlClockType_t type)
{
    static const char *const names[] = {"graphics", "sm", "mem", "video"};
    return (unsigned int)type < 4 ? names[type] : "none";
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *clock)
{
    char key[40];
    snprintf(key, sizeof key, "clock.%s", clock_name(type));
    return number32(device, key, clock);
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *clock)
{
    char key[40];
    snprintf(key, sizeof key, "clock_max.%s", clock_name(type));
    return number32(device, key, clock);
}

nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    return number(device, "reasons", reasons);
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *temperature)
{
    return sensor == NVML_TEMPERATURE_GPU ? number32(device, "temperature", temperature) : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *power)
{
    return number32(device, "power", power);
}

nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *limit)
{
    return number32(device, "power_limit", limit);
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    utilization->memory = 0;
    return number32(device, "utilization", &utilization->gpu);
}

nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t device, unsigned int *pcie_generation)
{
    return number32(device, "pcie_generation", pcie_generation);
}

nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned int *width)
{
    return number32(device, "pcie_width", width);
}

nvmlReturn_t nvmlDeviceGetPcieReplayCounter(nvmlDevice_t device, unsigned int *replays)
{
    return number32(device, "pcie_replays", replays);
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type,
                                         nvmlEccCounterType_t counter, unsigned long long *errors)
{
    if (type != NVML_MEMORY_ERROR_TYPE_UNCORRECTED || counter != NVML_VOLATILE_ECC)
        return NVML_ERROR_NOT_SUPPORTED;
    return number(device, "ecc_uncorrected", errors);
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *state)
{
    char key[40];
    unsigned int value = 0;
    nvmlReturn_t result;
    snprintf(key, sizeof key, "nvlink%u.state", link);
    result = link < NVML_NVLINK_MAX_LINKS ? number32(device, key, &value) : NVML_ERROR_INVALID_ARGUMENT;
    *state = (nvmlEnableState_t)value;
    return result;
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    int gpu, mig;
    nvmlReturn_t result = resolve(device, &gpu, &mig);
    for (int i = 0; !result && i < count; i++) {
        nvmlFieldValue_t *value = &values[i];
        char key[40];
        if (value->scopeId)
            snprintf(key, sizeof key, "field%u.%u", value->fieldId, value->scopeId);
        else
            snprintf(key, sizeof key, "field%u", value->fieldId);
        value->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
        value->nvmlReturn = number(device, key, &value->value.ullVal);
    }
    return result;
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
                                       unsigned int *is_pending, unsigned int *has_failed)
{
    nvmlReturn_t result = number32(device, "remapped", corrected);
    if (result)
        return result;
    *is_pending = *has_failed = 0;
    if (number32(device, "remapped_uncorrected", uncorrected))
        *uncorrected = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, nvmlPageRetirementCause_t cause, unsigned int *count,
                                       unsigned long long *addresses)
{
    char key[40];
    unsigned int room = *count;
    nvmlReturn_t result;
    snprintf(key, sizeof key, "retired%d", (int)cause);
    result = number32(device, key, count);
    if (result)
        return result;
    for (unsigned int i = 0; addresses && i < *count && i < room; i++)
        addresses[i] = i << 16;
    return *count > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

#ifndef STUB_OLD
nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    return number(device, "reasons", reasons);
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature)
{
    if (temperature->version != nvmlTemperature_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (temperature->sensorType != NVML_TEMPERATURE_GPU)
        return NVML_ERROR_INVALID_ARGUMENT;
    return number32(device, "temperature", (unsigned int *)&temperature->temperature);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos)
{
    return processes(device, count, infos);
}
#endif

/* ---- events --------------------------------------------------------------------------------------------------- */

/* The event after a serial: its code, and its serial in its place; 0 if there is none. */
static unsigned long long event_after(int gpu, long *serial)
{
    char text[256], *rest = text;
    unsigned long long code = 0;
    long next = 0;

    if (!look_up(gpu, -1, "xid", text, sizeof text))
        return 0;
    for (char *item; (item = strsep(&rest, ","));) {
        const char *at = strchr(item, '@');
        long own = at ? atol(at + 1) : 1;
        if (own > *serial && (!next || own < next)) {
            next = own;
            code = strtoull(item, NULL, 10);
        }
    }
    *serial = next;
    return code;
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    if (!references)
        return NVML_ERROR_UNINITIALIZED;
    pthread_mutex_lock(&lock);
    *set = NULL;
    for (int i = 0; i < SETS_MAX && !*set; i++)
        if (!event_sets[i].is_used) {
            event_sets[i].is_used = 1;
            *set = (nvmlEventSet_t)&event_sets[i];
        }
    pthread_mutex_unlock(&lock);
    return *set ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_RESOURCES;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    pthread_mutex_lock(&lock);
    memset((EventSet *)set, 0, sizeof(EventSet));
    pthread_mutex_unlock(&lock);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    EventSet *own = (EventSet *)set;
    char text[256];
    int gpu, mig;
    nvmlReturn_t result = resolve(device, &gpu, &mig);
    if (!result && look_up(gpu, -1, "events", text, sizeof text))
        result = code_of(text);
    if (result || !(types & nvmlEventTypeXidCriticalError))
        return result;
    own->is_registered[gpu] = 1;
    for (long serial = 0; event_after(gpu, &serial);) /* what came before is not told */
        own->delivered[gpu] = serial;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    EventSet *own = (EventSet *)set;
    for (long left_ms = timeout_ms;; left_ms -= TICK_NS / 1000000L) {
        for (int gpu = 0; gpu < n_gpus; gpu++) {
            long serial = own->delivered[gpu];
            char text[256];
            unsigned long long code;
            if (!own->is_registered[gpu])
                continue;
            code = event_after(gpu, &serial);
            if (!code && look_up(gpu, -1, "all", text, sizeof text) && code_of(text))
                return code_of(text);
            if (!code)
                continue;
            own->delivered[gpu] = serial;
            memset(data, 0, sizeof *data);
            data->device = handle_of(gpu, -1);
            data->eventType = nvmlEventTypeXidCriticalError;
            data->eventData = code;
            return NVML_SUCCESS;
        }
        if (left_ms <= 0)
            return NVML_ERROR_TIMEOUT;
        pause_ms(TICK_NS / 1000000L);
    }
}
