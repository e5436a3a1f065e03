/* The module aiordma._native._fast. */
#include "fetch.h"

PyTypeObject *fast_add_subtype(PyObject *module, PyType_Spec *spec, PyTypeObject *base)
{
	PyObject *type = PyType_FromModuleAndSpec(module, spec, (PyObject *)base);

	if (!type)
		return NULL;
	int rc = PyModule_AddType(module, (PyTypeObject *)type);
	Py_DECREF(type); /* the module has it, and the module stays */
	return rc ? NULL : (PyTypeObject *)type;
}

PyTypeObject *fast_add_type(PyObject *module, PyType_Spec *spec)
{
	return fast_add_subtype(module, spec, NULL);
}

int fast_no_keywords(PyObject *keywords)
{
	if (!keywords || !PyDict_Size(keywords))
		return 0;
	PyErr_SetString(PyExc_TypeError, "no keywords");
	return -1;
}

void fast_free(PyObject *object)
{
	PyTypeObject *type = Py_TYPE(object);
	freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

	release(object);
	Py_DECREF(type);
}

static struct PyModuleDef definition = {
	PyModuleDef_HEAD_INIT,
	.m_name = "aiordma._native._fast",
	.m_doc = "The objects of the fast path.",
	.m_size = -1,
};

PyMODINIT_FUNC PyInit__fast(void)
{
	PyObject *module = PyModule_Create(&definition);

	if (!module)
		return NULL;
	if (fast_add_memory(module) || fast_add_block(module) || fast_add_message(module) ||
	    fast_add_run(module) || fast_add_batch(module) || fast_add_work(module) ||
	    fast_add_table(module) || fast_add_queue(module) || fast_add_drain(module) ||
	    fast_add_promise(module) || fast_add_account(module) || fast_add_frame(module) ||
	    fast_add_counts(module) || fast_add_inbox(module) || fast_add_incoming(module) ||
	    fast_add_fetch(module) || fast_add_offers(module) || fast_add_traffic(module) ||
	    fast_add_arrivals(module) || fast_add_arrival() || fast_add_refill() ||
	    PyModule_AddIntConstant(module, "TRANSFER_SIZE", (long)AIORDMA_TRANSFER_SIZE) ||
	    PyModule_AddIntConstant(module, "OFFER_ROOM", OFFER_ROOM) ||
	    PyModule_AddIntConstant(module, "EARLIER", (long)AIORDMA_EARLIER)) {
		Py_DECREF(module);
		return NULL;
	}
	return module;
}
