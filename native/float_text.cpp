// Writes arrays of float32 as JSON, each number by as few digits as tell it from its neighbours. A module of its own, for `fast_json`.
//
// Python's float is a double: there a float32 has seventeen digits, and an embedding nearly twice as many bytes.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <charconv>
#include <cmath>
#include <cstring>
#include <string>

namespace {

constexpr size_t kMostChars = 16;  // -1.17549435e-38 has fifteen

char* write(char* to, float value) {
    if (!std::isfinite(value)) {
        std::memcpy(to, "null", 4);
        return to + 4;
    }
    char* const end = std::to_chars(to, to + kMostChars, value).ptr;
    for (const char* c = to; c < end; ++c) {
        if (*c == '.' || *c == 'e') return end;
    }
    std::memcpy(end, ".0", 2);  // so that readers don't take it for an integer
    return end + 2;
}

// [rows, columns] as lists of lists, or as one list if there is no `rows`.
std::string text_of(const float* values, Py_ssize_t rows, Py_ssize_t columns, bool has_rows) {
    std::string text;
    text.resize(static_cast<size_t>(rows * columns) * (kMostChars + 3) + static_cast<size_t>(rows) * 3 + 2);
    char* to = text.data();
    if (has_rows) *to++ = '[';
    for (Py_ssize_t row = 0; row < rows; ++row) {
        if (row > 0) *to++ = ',';
        *to++ = '[';
        for (Py_ssize_t column = 0; column < columns; ++column) {
            if (column > 0) *to++ = ',';
            to = write(to, *values++);
        }
        *to++ = ']';
    }
    if (has_rows) *to++ = ']';
    text.resize(static_cast<size_t>(to - text.data()));
    return text;
}

PyObject* text_of_floats(PyObject*, PyObject* array) {
    Py_buffer view;
    if (PyObject_GetBuffer(array, &view, PyBUF_ND | PyBUF_FORMAT) != 0) return nullptr;
    PyObject* found = nullptr;
    if ((view.ndim != 1 && view.ndim != 2) || std::strcmp(view.format, "f") != 0) {
        PyErr_SetString(PyExc_ValueError, "an array of float32 with one dimension or two is written");
    } else {
        const bool has_rows = view.ndim == 2;
        std::string text;
        bool has_memory = true;
        Py_BEGIN_ALLOW_THREADS;
        try {
            text = text_of(static_cast<const float*>(view.buf), has_rows ? view.shape[0] : 1, view.shape[view.ndim - 1], has_rows);
        } catch (const std::bad_alloc&) {
            has_memory = false;
        }
        Py_END_ALLOW_THREADS;
        found = has_memory ? PyBytes_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())) : PyErr_NoMemory();
    }
    PyBuffer_Release(&view);
    return found;
}

PyMethodDef methods[] = {
    {"text_of_floats", text_of_floats, METH_O, "Return a contiguous float32 array [columns] or [rows, columns] as JSON. NaN and infinities are null."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_float_text", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__float_text() {
    PyObject* const module = PyModule_Create(&definition);
#ifdef Py_GIL_DISABLED
    if (module) PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);  // it has no state
#endif
    return module;
}
