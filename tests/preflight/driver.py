"""A made-up driver of two GPUs, which answers as pynvml does."""

from types import SimpleNamespace


class NVMLError(Exception):
    pass


class NotSupported(NVMLError):
    pass


class Driver:
    """Two sound H100s, unless a GPU's entry says otherwise."""

    NVMLError, NVMLError_NotSupported = NVMLError, NotSupported
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230

    def __init__(self, **second) -> None:
        sound = {'name': 'NVIDIA H100 80GB HBM3', 'free': 79, 'total': 80, 'processes': [], 'rows': (0, 0, 0, 0)}
        sound |= {'errors': 0, 'recovery': 0}
        self.gpus = [sound, sound | second]

    def get(self, gpu, key):
        value = gpu[key]
        if isinstance(value, Exception):
            raise value
        return value

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.gpus[index]

    def nvmlDeviceGetName(self, gpu):
        return self.get(gpu, 'name')

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return SimpleNamespace(total=self.get(gpu, 'total') * 2**30, free=self.get(gpu, 'free') * 2**30)

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
