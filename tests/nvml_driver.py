"""Fake of the pynvml module with two GPUs."""

from types import SimpleNamespace


class NVMLError(Exception):
    pass


class NotSupported(NVMLError):
    pass


class TimedOut(NVMLError):
    pass


class Driver:
    """Fake pynvml with two healthy H100s; keywords change values of the second one, exceptions are raised when read."""

    NVMLError, NVMLError_NotSupported, NVMLError_Timeout = NVMLError, NotSupported, TimedOut
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1
    nvmlClocksThrottleReasonHwSlowdown, nvmlClocksThrottleReasonSwThermalSlowdown = 8, 32
    nvmlEventTypeXidCriticalError = 8
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230

    def __init__(self, **second) -> None:
        healthy = {'name': 'NVIDIA H100 80GB HBM3', 'free': 79, 'total': 80, 'processes': [], 'rows': (0, 0, 0, 0)}
        healthy |= {'errors': 0, 'recovery': 0, 'temperature': 71, 'throttle': 4}
        self.gpus = [healthy, healthy | second]
        self.xids: list[int] = []

    def get(self, gpu, key):
        value = gpu[key]
        if isinstance(value, Exception):
            raise value
        return value

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return self.gpus[1]

    def nvmlDeviceGetName(self, gpu):
        return self.get(gpu, 'name')

    def nvmlDeviceGetMemoryInfo(self, gpu):
        total, free = self.get(gpu, 'total') * 2**30, self.get(gpu, 'free') * 2**30
        return SimpleNamespace(total=total, free=free, used=total - free)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        return [SimpleNamespace(pid=pid) for pid in self.get(gpu, 'processes')]

    def nvmlDeviceGetRemappedRows(self, gpu):
        return self.get(gpu, 'rows')

    def nvmlDeviceGetTotalEccErrors(self, gpu, kind, counter):
        assert (kind, counter) == (1, 0)
        return self.get(gpu, 'errors')

    def nvmlDeviceGetFieldValues(self, gpu, fields):
        assert fields == [230]
        action = self.get(gpu, 'recovery')
        return [SimpleNamespace(nvmlReturn=3 if action is None else 0, value=SimpleNamespace(uiVal=action))]

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetTemperature(self, gpu, kind):
        return self.get(gpu, 'temperature')

    def nvmlDeviceGetClockInfo(self, gpu, kind):
        return 1485

    def nvmlDeviceGetMaxClockInfo(self, gpu, kind):
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu):
        return self.get(gpu, 'throttle')

    def nvmlEventSetCreate(self):
        return 'events'

    def nvmlDeviceRegisterEvents(self, gpu, kinds, events):
        pass

    def nvmlEventSetWait_v2(self, events, milliseconds):
        if not self.xids:
            raise TimedOut
        return SimpleNamespace(eventData=self.xids.pop())
